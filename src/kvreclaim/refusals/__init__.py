"""Rows of the compatibility table: features that cannot be combined."""
