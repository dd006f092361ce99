"""From logits to tokens and text."""
