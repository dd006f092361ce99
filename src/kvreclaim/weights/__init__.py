"""Weights of 4, 6 and 8 bits as checkpoints hold them."""
