"""Prompts are computed with sparse attention."""
