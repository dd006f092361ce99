"""Compression settings that make many passes over short sequences, and what holds afterwards."""

from __future__ import annotations

from kvreclaim import CompressionConfig


def small(policy: str = "query_mixture", **fields) -> CompressionConfig:
    """A budget that makes many passes over short sequences."""
    return CompressionConfig(policy, **{"budget": 24, "interval": 8, "sinks": 2, "recent": 8, **fields})


def assert_idle(llm) -> None:
    """Nothing runs or waits, and every block is free or cached."""
    llm.engine.memory.check()
    stats = llm.engine.memory.stats()
    assert stats.in_use == 0
    assert stats.free + stats.cached == stats.num_blocks
    assert not llm.engine.has_unfinished
    assert not llm.engine.scheduler.waiting
    assert not llm.engine.scheduler.running
