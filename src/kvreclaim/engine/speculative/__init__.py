"""Drafts from the text or from a smaller model, verified in one forward pass."""
