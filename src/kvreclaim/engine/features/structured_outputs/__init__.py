"""Outputs follow a grammar."""
