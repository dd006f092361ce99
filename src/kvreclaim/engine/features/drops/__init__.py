"""Spans of a prompt leave the cache."""
