"""Compressed prefixes that later requests begin with."""
