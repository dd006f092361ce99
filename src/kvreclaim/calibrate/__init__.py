"""Offline measuring of a model: its statistics, its sparse prefill patterns, its best policy."""
