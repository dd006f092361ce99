"""From a step to the model's logits."""
