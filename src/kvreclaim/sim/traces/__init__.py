"""Requests from files, from distributions, from conversations."""
