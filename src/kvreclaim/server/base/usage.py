"""Usage of a request: OpenAI's counts, and KV cache figures of both dialects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvreclaim.engine.features import FEATURES
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.server.base.fields import with_usage


def kv_cache_usage(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Sum tokens and blocks over a request's prompts; peak_blocks is the maximum over outputs. policy,
    budget, sinks: None without compression. reclaim_efficiency: freed blocks per freeable block; None if none
    could be freed."""
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
    } | {name: sum(map(figure, metrics)) for feature in FEATURES for name, figure in feature.usage.items()}


def usage_of(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Sum OpenAI's counts and the KV cache figures over a request's prompts."""
    usage = token_usage(metrics, sum(m.num_generated_tokens for m in metrics))
    if (reasoning := reasoning_tokens(metrics)) is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return {**usage, "kv_cache": kv_cache_usage(metrics)}


def reasoning_tokens(metrics: Sequence[RequestMetrics]) -> int | None:
    """Generated reasoning tokens; None without a reasoning parser."""
    found = [m.num_reasoning_tokens for m in metrics if m.num_reasoning_tokens is not None]
    return sum(found) if found else None


def token_usage(metrics: Sequence[RequestMetrics], num_generated: int) -> dict[str, Any]:
    num_prompt = sum(m.num_prompt_tokens for m in metrics)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": _cached(metrics),
    }


def _cached(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Prompt tokens that were not computed; of these, those of snapshots; by tier, if any came from host or
    disk."""
    cached = sum(m.num_cached_tokens for m in metrics)
    loaded, disk = sum(m.num_loaded_tokens for m in metrics), sum(m.num_disk_tokens for m in metrics)
    found = {"cached_tokens": cached, "snapshot_tokens": sum(m.num_snapshot_tokens for m in metrics)}
    if not loaded:
        return found
    by_tier = {"device": cached - loaded, "host": loaded - disk, "disk": disk}
    return {**found, "cached_tokens_by_tier": by_tier}


Responses = dict[int | str, dict[str, Any]]


class ResponseSchema(BaseModel):
    """The schema of an answer; tests validate answers against it."""

    model_config = ConfigDict(extra="forbid")


@with_usage
class KVCacheUsage(ResponseSchema):
    policy: str | None
    budget: int | None
    sinks: int | None
    tokens_evicted: int
    blocks_freed: int
    peak_blocks: int
    final_blocks: int
    reclaim_efficiency: float | None


def errors_of(model: type[BaseModel]) -> Responses:
    """Error statuses of a generating route. model: the body."""
    return {status: {"model": model} for status in (400, 401, 404, 408, 413, 429, 500, 503)}


def streamed_body(model: type[BaseModel], events: str) -> Responses:
    """An answer that is one JSON object, or server-sent events with `stream`. events: their description."""
    content = {"text/event-stream": {"schema": {"type": "string", "description": events}}}
    return {200: {"model": model, "description": "The answer.", "content": content}}
