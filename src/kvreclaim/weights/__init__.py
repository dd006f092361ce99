"""Weights of 2 to 8 bits as checkpoints hold them."""
