"""What the engine moves between its pool and the host: blocks, and all else that a parked sequence has."""
