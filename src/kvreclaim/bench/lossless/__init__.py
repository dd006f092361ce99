"""Verify mode beside the full cache and the lossy one: the same tokens first, then speed and memory."""
