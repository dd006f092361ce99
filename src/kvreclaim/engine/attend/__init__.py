"""Cache reads of a step: block tables, windows, unequal heads, sparse reads, streamed tiles."""
