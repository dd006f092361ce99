"""Which signals a request's policy needs."""

from __future__ import annotations

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.policy import CompressionPolicy, Signal


def needs_of(compressor: Compressor | None) -> frozenset[Signal]:
    """Signals that the compressor needs, if it ever evicts."""
    return frozenset() if compressor is None else compressor.needs


def window_of(policy: CompressionPolicy) -> int | None:
    """Queries before the first pass that must be computed, not found in the prefix index; None: all."""
    if Signal.ATTENTION_MASS in policy.needs:
        return None
    return max(1, policy.query_window) if Signal.RECENT_QUERIES in policy.needs else 1
