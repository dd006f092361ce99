"""Layers that see only the last tokens: a window of each sequence, in blocks of the same pool."""
