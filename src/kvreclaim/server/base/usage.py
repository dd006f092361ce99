"""Usage of a request: OpenAI's counts, and what both dialects tell of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvreclaim.engine.request.outputs import RequestMetrics


def kv_cache_usage(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Over a request's prompts: tokens and blocks are sums, but for peak_blocks, the most that one output
    held. policy, budget, sinks: of their compression, None without. reclaim_efficiency: blocks freed of those
    that could be; None where none could."""
    perfect = sum(m.blocks_perfect for m in metrics)
    freed = sum(m.blocks_freed for m in metrics)
    return {
        "policy": metrics[0].policy,
        "budget": metrics[0].budget,
        "sinks": metrics[0].sinks,
        "tokens_evicted": sum(m.tokens_evicted for m in metrics),
        "blocks_freed": freed,
        "peak_blocks": max(m.peak_blocks for m in metrics),
        "final_blocks": sum(m.final_blocks for m in metrics),
        "reclaim_efficiency": freed / perfect if perfect else None,
        "reused_tokens": sum(m.num_reused_tokens for m in metrics),
        "snapshot_tokens": sum(m.num_snapshot_tokens for m in metrics),
        "dropped_tokens": sum(m.num_dropped_tokens for m in metrics),
    }


def usage_of(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Sums over a request's prompts; OpenAI's counts, and beside them what its cache gave back."""
    usage = token_usage(metrics, sum(m.num_generated_tokens for m in metrics))
    if (reasoning := reasoning_tokens(metrics)) is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return {**usage, "kv_cache": kv_cache_usage(metrics)}


def reasoning_tokens(metrics: Sequence[RequestMetrics]) -> int | None:
    """Generated tokens of reasoning; None where nobody looks for it."""
    found = [m.num_reasoning_tokens for m in metrics if m.num_reasoning_tokens is not None]
    return sum(found) if found else None


def token_usage(metrics: Sequence[RequestMetrics], num_generated: int) -> dict[str, Any]:
    """The part that is known while a request runs."""
    num_prompt = sum(m.num_prompt_tokens for m in metrics)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": _cached(metrics),
    }


def _cached(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Prompt tokens that were not computed; of these, those of snapshots; where they lay, if any came from
    below the pool."""
    cached = sum(m.num_cached_tokens for m in metrics)
    loaded, disk = sum(m.num_loaded_tokens for m in metrics), sum(m.num_disk_tokens for m in metrics)
    found = {"cached_tokens": cached, "snapshot_tokens": sum(m.num_snapshot_tokens for m in metrics)}
    if not loaded:
        return found
    by_tier = {"device": cached - loaded, "host": loaded - disk, "disk": disk}
    return {**found, "cached_tokens_by_tier": by_tier}


Responses = dict[int | str, dict[str, Any]]


class ResponseSchema(BaseModel):
    """The shape of an answer; tests hold the answers against it."""

    model_config = ConfigDict(extra="forbid")


class KVCacheUsage(ResponseSchema):
    policy: str | None
    budget: int | None
    sinks: int | None
    tokens_evicted: int
    blocks_freed: int
    peak_blocks: int
    final_blocks: int
    reclaim_efficiency: float | None
    reused_tokens: int
    snapshot_tokens: int
    dropped_tokens: int


def errors_of(model: type[BaseModel]) -> Responses:
    """Every status that a route which generates may refuse with. model: the body."""
    return {status: {"model": model} for status in (400, 401, 404, 408, 413, 429, 500, 503)}


def streamed_body(model: type[BaseModel], events: str) -> Responses:
    """An answer that is one JSON object, or server-sent events with `stream`. events: what they are."""
    content = {"text/event-stream": {"schema": {"type": "string", "description": events}}}
    return {200: {"model": model, "description": "The answer.", "content": content}}
