"""Pages of evicted tokens: their packing, their digests and their scores. Moves no bytes."""
