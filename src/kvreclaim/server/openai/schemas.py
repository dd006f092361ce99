"""Schemas of answers for the OpenAPI description; tests compare answers with them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from kvreclaim.server.base.errors import OpenAIError
from kvreclaim.server.base.fields import KVCacheUsage, Responses, ResponseSchema, errors_of, streamed_body


class CachedByTier(ResponseSchema):
    device: int
    host: int
    disk: int


class PromptTokensDetails(ResponseSchema):
    """snapshot_tokens: cached tokens of compressed prefixes. cached_tokens_by_tier: present if host or disk
    served some; its sum is cached_tokens."""

    cached_tokens: int
    snapshot_tokens: int
    cached_tokens_by_tier: CachedByTier | None = None


class CompletionTokensDetails(ResponseSchema):
    reasoning_tokens: int


class Usage(ResponseSchema):
    """kv_cache is present when the request has ended, completion_tokens_details with a reasoning parser."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    kv_cache: KVCacheUsage | None = None


class PromptLogprob(ResponseSchema):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length", "abort"]


class CompletionLogprobs(ResponseSchema):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseSchema):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    cumulative_logprob: float | None = None
    sequences_scores: float | None = None


class Completion(ResponseSchema):
    """Also the shape of a chunk."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprob(ResponseSchema):
    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseSchema):
    content: list[ChatTokenLogprob]


class CalledFunction(ResponseSchema):
    name: str | None = None
    arguments: str


class AnsweredCall(ResponseSchema):
    """index only in chunks; id, type and name only in a call's first chunk."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(ResponseSchema):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(ResponseSchema):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    cumulative_logprob: float | None = None
    sequences_scores: float | None = None


class ChatChunkChoice(ResponseSchema):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseSchema):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    usage: Usage


class ChatCompletionChunk(ResponseSchema):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


ERRORS = errors_of(OpenAIError)


def streamed(model: type[BaseModel]) -> Responses:
    return streamed_body(model, "`data:` lines, each a chunk; the last is [DONE]")
