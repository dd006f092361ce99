"""A worker's process: which tokens are kept, and the bytes that move."""
