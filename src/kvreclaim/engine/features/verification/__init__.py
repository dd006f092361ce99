"""Verify mode: a compressed cache drafts, and the full one verifies the drafts."""
