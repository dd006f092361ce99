"""What a caller asked for, the running sequence, what it holds and what comes out of it."""
