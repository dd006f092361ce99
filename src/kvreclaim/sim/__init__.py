"""What an engine would do, without a model: its own scheduler and memory under a virtual clock."""
