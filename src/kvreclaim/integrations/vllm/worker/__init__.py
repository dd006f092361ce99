"""A worker's process: choose the kept tokens and move their bytes."""
