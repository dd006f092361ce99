"""Offline measuring of a model: its statistics, its best policy."""
