"""Weights of 2 to 8 bits in the formats of checkpoints."""
