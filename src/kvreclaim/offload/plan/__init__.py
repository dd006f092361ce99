"""The content of each slot on the host and on disk: prefixes, parked sequences, states. Integers only."""
