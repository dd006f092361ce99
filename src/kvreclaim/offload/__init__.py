"""Memory below the block pool: `plan` decides about slots, `store` has their bytes, files and threads."""
