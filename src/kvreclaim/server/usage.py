"""What the KV cache did for a request, as the usage of both dialects tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvreclaim.engine.core.outputs import RequestMetrics


def kv_cache_usage(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Over a request's prompts: tokens and blocks are sums, but for peak_blocks, the most that one output
    held. reclaim_efficiency: blocks freed of those that could be; None where none could."""
    perfect = sum(m.blocks_perfect for m in metrics)
    freed = sum(m.blocks_freed for m in metrics)
    return {
        "tokens_evicted": sum(m.tokens_evicted for m in metrics),
        "blocks_freed": freed,
        "peak_blocks": max(m.peak_blocks for m in metrics),
        "reclaim_efficiency": freed / perfect if perfect else None,
    }
