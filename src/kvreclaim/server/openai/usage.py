"""The usage of a request over all its prompts and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvreclaim.engine.core.outputs import RequestMetrics
from kvreclaim.server.usage import kv_cache_usage


def usage_of(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Sums over a request's prompts; OpenAI's counts, and beside them what its cache gave back."""
    usage = token_usage(metrics, sum(m.num_generated_tokens for m in metrics))
    return {**usage, "kv_cache": kv_cache_usage(metrics)}


def token_usage(metrics: Sequence[RequestMetrics], num_generated: int) -> dict[str, Any]:
    """The part that is known while a request runs."""
    num_prompt = sum(m.num_prompt_tokens for m in metrics)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(m.num_cached_tokens for m in metrics)},
    }
