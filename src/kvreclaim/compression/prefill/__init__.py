"""Sparse prefill: which blocks before them the tokens of a prompt read."""
