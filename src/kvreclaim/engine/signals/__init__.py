"""Signals: inputs of policies besides keys and values."""
