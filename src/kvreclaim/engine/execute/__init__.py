"""Compute the model's logits of a step."""
