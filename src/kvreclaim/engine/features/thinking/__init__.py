"""Reasoning of outputs: its tokens are counted, and a budget ends it."""
