"""Compression passes: which tokens a policy keeps, where they move, and how evicted ones come back."""
