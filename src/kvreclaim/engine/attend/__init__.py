"""How a step reads the cache: block tables, windows, unequal heads, sparse reads, streamed tiles."""
