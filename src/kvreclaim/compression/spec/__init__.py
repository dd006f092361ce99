"""Policies as text, and what that text means for memory: no torch."""
