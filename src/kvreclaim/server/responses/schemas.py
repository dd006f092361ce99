"""Schemas of answers for the OpenAPI description; tests compare answers with them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from kvreclaim.server.base.fields import KVCacheUsage, ResponseSchema
from kvreclaim.server.openai.schemas import ChatTokenLogprob, CompletionTokensDetails, PromptTokensDetails

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseSchema):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputReasoning(ResponseSchema):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(ResponseSchema):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputCall(ResponseSchema):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningOutput(ResponseSchema):
    """summary: always empty"""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[OutputReasoning]


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int


class ResponseUsage(ResponseSchema):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int
    kv_cache: KVCacheUsage


class IncompleteDetails(ResponseSchema):
    reason: Literal["max_output_tokens"]


class ResponseFailure(ResponseSchema):
    """invalid_prompt: contradicting options of the request"""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponseObject(BaseModel):
    """Has the request's settings besides these fields, with defaults.

    store: whether it is stored
    usage: null if a stream failed
    """

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputCall | ReasoningOutput]
    store: bool
    usage: ResponseUsage | None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None
