"""Verify mode compared with the full cache and lossy mode: equal tokens first, then speed and memory."""
