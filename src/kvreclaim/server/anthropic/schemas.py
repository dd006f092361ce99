"""What answers look like, for the OpenAPI description; tests hold the answers against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from kvreclaim.server.errors import AnthropicError
from kvreclaim.server.openai.schemas import KVCacheUsage, Responses, Shape


class TokensCount(Shape):
    input_tokens: int


class CacheCreation(Shape):
    """Tokens by the time for which they are retained."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Shape):
    """The three counts of input sum to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    kv_cache: KVCacheUsage


class AnsweredText(Shape):
    type: Literal["text"]
    text: str


class AnsweredToolUse(Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", "pause_turn"
]


class AnsweredMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredToolUse]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage


ERRORS: Responses = {status: {"model": AnthropicError} for status in (400, 401, 404, 413, 429, 500, 503)}


def streamed() -> Responses:
    """An answer that is one JSON object, or server-sent events with `stream`."""
    model: type[BaseModel] = AnsweredMessage
    events = {"schema": {"type": "string", "description": "`event:` and `data:` lines"}}
    return {200: {"model": model, "description": "The answer.", "content": {"text/event-stream": events}}}
