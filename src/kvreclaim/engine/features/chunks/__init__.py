"""Chunks of a prompt are computed once and reused at other positions."""
