"""Storage below the pool: slots in host memory, a file of slots on disk."""
