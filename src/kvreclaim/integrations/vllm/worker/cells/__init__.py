"""Heads that keep unequal numbers of tokens inside vLLM: cells, their tables, the passes over them."""
