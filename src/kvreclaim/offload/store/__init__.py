"""The bytes below the block pool: slots in host memory, a file of slots on disk."""
