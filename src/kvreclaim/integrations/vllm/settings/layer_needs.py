"""Policies that need the inputs of layers, and the queries and bytes that they keep."""

from __future__ import annotations

from typing import Protocol

from kvreclaim.checks import require
from kvreclaim.compression.policy import CompressionPolicy, Signal

WATCHED = frozenset({Signal.RECENT_QUERIES, Signal.TOKEN_SCORES})
"""Signals that need hooks on the layers."""


class Serves(Protocol):
    """Raise InvalidArgumentError for a policy that this vLLM cannot serve, or not with snapshots."""

    def __call__(self, policy: CompressionPolicy, *, snapshots: bool) -> None: ...


def serves_all(policy: CompressionPolicy, *, snapshots: bool) -> None:
    """Serve every policy."""


def query_window(policy: CompressionPolicy, block_size: int) -> int:
    """Queries that must be computed before a pass; 0: none. Unequal heads leave the open block where it is,
    and look at the queries before it."""
    if Signal.RECENT_QUERIES not in policy.needs:
        return 0
    return policy.query_window + (block_size - 1 if policy.eviction_method.uneven else 0)


def signal_bytes(
    policy: CompressionPolicy,
    block_size: int,
    available: int,
    *,
    num_heads: int,
    head_bytes: int,
    num_rows: int,
) -> int:
    """Bytes that hooks keep on one worker, of those available for a pool and for them.

    Queries: half as many again, as their store doubles when it has no row left. Scores: two bytes per key and
    value.

    Args:
        num_heads:  query heads of all layers; head_bytes: of one query, key or value
        num_rows:   requests at once
    """
    queries = query_window(policy, block_size) * num_heads * head_bytes * num_rows * 3 // 2
    if Signal.TOKEN_SCORES not in policy.needs:
        return min(queries, available)
    return min(available, queries + max(0, available - queries) // (head_bytes + 1))


def check_window(requested: CompressionPolicy, started: CompressionPolicy) -> None:
    """Raise InvalidArgumentError for a request's policy that looks further back than the engine's."""
    if Signal.RECENT_QUERIES in requested.needs:
        require(
            requested.query_window <= started.query_window,
            f"policy {requested.name!r} looks at the last {requested.query_window} queries, and this server, "
            f"started with {started.name!r}, keeps {started.query_window}; ask for a policy that looks at no "
            "more.",
        )
