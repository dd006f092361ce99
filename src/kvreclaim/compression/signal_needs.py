"""Which signals a request's policy needs."""

from __future__ import annotations

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.policy import Signal


def needs_of(compressor: Compressor | None) -> frozenset[Signal]:
    """What a policy that ever evicts asks for."""
    return compressor.policy.needs if compressor is not None and compressor.way.evicts else frozenset()
