"""Prefix caching: block keys, their index, hits of prompts and reasons of misses."""
