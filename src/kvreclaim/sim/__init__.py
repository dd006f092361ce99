"""The simulator: an engine's scheduler and memory under a virtual clock, without a model."""
