"""How many of a prompt's tokens came from the prefix cache, went into it, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvreclaim.engine.api.exports import Retention
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.server.anthropic.fields import TTL_S
from kvreclaim.server.usage import kv_cache_usage


def input_usage(metrics: RequestMetrics, breakpoints: Sequence[Retention], block_size: int) -> dict[str, Any]:
    """Three counts that sum to the prompt.

    read:     tokens whose K/V were served from the prefix cache
    creation: tokens behind these, up to the last breakpoint, in whole blocks that entered the prefix index;
              by the longest TTL that covers them. A block that it had already is none of these
    input:    all others
    """
    read = metrics.num_cached_tokens

    def created(points: Sequence[Retention]) -> int:
        reach = max((point.num_tokens // block_size * block_size for point in points), default=0)
        return max(0, min(reach, metrics.num_indexed_tokens) - read - metrics.num_repeated_tokens)

    creation = created(breakpoints)
    longer = created([point for point in breakpoints if point.ttl_s == TTL_S["1h"]])
    return {
        "input_tokens": metrics.num_prompt_tokens - read - creation,
        "cache_creation_input_tokens": creation,
        "cache_read_input_tokens": read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": creation - longer,
            "ephemeral_1h_input_tokens": longer,
        },
    }


def whole_usage(metrics: RequestMetrics, breakpoints: Sequence[Retention], block_size: int) -> dict[str, Any]:
    """At the end of a request: input, output, and what compression did."""
    return {
        **input_usage(metrics, breakpoints, block_size),
        "output_tokens": metrics.num_generated_tokens,
        "kv_cache": kv_cache_usage([metrics]),
    }
