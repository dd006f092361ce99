"""What the tiers below the pool are worth: hits, time to the first token, and swapping."""
