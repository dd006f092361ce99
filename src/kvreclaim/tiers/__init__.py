"""Where blocks lie that the pool does not hold: slots in host memory, a file of slots on disk."""
