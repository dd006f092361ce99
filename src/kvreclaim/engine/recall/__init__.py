"""Cold pages of evicted tokens, and how they come back."""
