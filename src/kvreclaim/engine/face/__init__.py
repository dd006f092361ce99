"""What callers see of the engine."""
