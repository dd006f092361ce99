"""How much memory and time a model takes, from its config alone: no weights, no torch, no GPU."""
