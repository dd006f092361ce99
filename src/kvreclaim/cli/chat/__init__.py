"""`kvreclaim run`: a conversation in the terminal."""
