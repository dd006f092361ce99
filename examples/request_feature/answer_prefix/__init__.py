"""Outputs begin with given tokens."""
