"""Requests: the caller's spec, the running sequence, its footprint and its outputs."""
