"""Compression passes: which tokens a policy keeps, and where they move."""
