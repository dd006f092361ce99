"""Schemas of answers for the OpenAPI description; tests compare answers with them."""

from __future__ import annotations

from typing import Any, Literal

from kvreclaim.server.base.errors import AnthropicError
from kvreclaim.server.base.usage import KVCacheUsage, ResponseSchema, errors_of, streamed_body


class TokensCount(ResponseSchema):
    input_tokens: int


class CacheCreation(ResponseSchema):
    """Tokens by TTL."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class OutputTokensDetails(ResponseSchema):
    thinking_tokens: int


class MessageUsage(ResponseSchema):
    """The three input counts sum to the prompt; output_tokens_details is present with a reasoning parser."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None = None
    kv_cache: KVCacheUsage


class AnsweredText(ResponseSchema):
    type: Literal["text"]
    text: str


class AnsweredToolUse(ResponseSchema):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnsweredThinking(ResponseSchema):
    type: Literal["thinking"]
    thinking: str
    signature: str


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", "pause_turn"
]


class AnsweredMessage(ResponseSchema):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage


ERRORS = errors_of(AnthropicError)
STREAMED = streamed_body(AnsweredMessage, "`event:` and `data:` lines")
