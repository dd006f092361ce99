"""Puts this directory on the path, for tests below it that share tolerances.py."""
