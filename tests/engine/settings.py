"""Compression settings that make many passes over short sequences."""

from __future__ import annotations

from kvreclaim import CompressionConfig


def small(policy: str = "query_mixture", **fields) -> CompressionConfig:
    """A budget that makes many passes over short sequences."""
    return CompressionConfig(policy, **{"budget": 24, "interval": 8, "sinks": 2, "recent": 8, **fields})
