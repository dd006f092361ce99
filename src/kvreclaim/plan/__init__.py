"""Memory and time of a model from its config alone, without weights, torch or a GPU."""
