"""Which tokens of a live sequence stay, how many, and where they move."""
