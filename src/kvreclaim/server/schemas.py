"""Pieces of the OpenAPI description that both dialects have."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

Responses = dict[int | str, dict[str, Any]]


class ResponseSchema(BaseModel):
    """The shape of an answer; tests hold the answers against it."""

    model_config = ConfigDict(extra="forbid")


class KVCacheUsage(ResponseSchema):
    policy: str | None
    budget: int | None
    tokens_evicted: int
    blocks_freed: int
    peak_blocks: int
    reclaim_efficiency: float | None
    reused_tokens: int


def errors_of(model: type[BaseModel]) -> Responses:
    """Every status that a route which generates may refuse with. model: the body."""
    return {status: {"model": model} for status in (400, 401, 404, 408, 413, 429, 500, 503)}


def streamed(model: type[BaseModel], events: str) -> Responses:
    """An answer that is one JSON object, or server-sent events with `stream`. events: what they are."""
    content = {"text/event-stream": {"schema": {"type": "string", "description": events}}}
    return {200: {"model": model, "description": "The answer.", "content": content}}
