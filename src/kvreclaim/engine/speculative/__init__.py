"""Drafts from the text, from a smaller model or from a compressed cache, verified in one forward pass."""
