"""The usage of a request over all its prompts and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvreclaim.engine.outputs import RequestMetrics


def usage_of(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Sums over a request's prompts; OpenAI's counts, and beside them what its cache gave back."""
    efficiency = None
    if perfect := sum(m.blocks_perfect for m in metrics):
        efficiency = sum(m.blocks_freed for m in metrics) / perfect
    usage = token_usage(metrics, sum(m.num_generated_tokens for m in metrics))
    usage["kv_cache"] = {
        "tokens_evicted": sum(m.tokens_evicted for m in metrics),
        "blocks_freed": sum(m.blocks_freed for m in metrics),
        "peak_blocks": max(m.peak_blocks for m in metrics),
        "reclaim_efficiency": efficiency,
    }
    return usage


def token_usage(metrics: Sequence[RequestMetrics], num_generated: int) -> dict[str, Any]:
    """The part that is known while a request runs."""
    num_prompt = sum(m.num_prompt_tokens for m in metrics)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(m.num_cached_tokens for m in metrics)},
    }
