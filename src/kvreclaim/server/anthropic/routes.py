"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.features.snapshots.feature import SnapshotUse, rewritten
from kvreclaim.engine.features.structured_outputs.wire import checked
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.server.anthropic.answer import AnthropicResponse
from kvreclaim.server.anthropic.fields import ConversationFields, MessageRequest
from kvreclaim.server.anthropic.prompt import Rendered, check_size, render
from kvreclaim.server.base.errors import AnthropicError
from kvreclaim.server.base.fields import KVCacheUsage, ResponseSchema, errors_of, http_options, streamed_body
from kvreclaim.server.base.identity import Tenant, request_id_of
from kvreclaim.server.http.events import answer_json, stream_events
from kvreclaim.server.shared.bodies import SHARED, BodyRoute, check_priority, sampling_of
from kvreclaim.server.shared.calls import check_grammars, check_offer, format_of, with_grammar
from kvreclaim.server.shared.output_format import OutputFormat
from kvreclaim.server.shared.service import Service, ServiceDep, TenantDep

ERRORS = errors_of(AnthropicError)


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


STREAMED = streamed_body(AnsweredMessage, "`event:` and `data:` lines")


router = APIRouter(tags=["anthropic"], route_class=BodyRoute)


@router.post("/v1/messages", responses=ERRORS | STREAMED, response_class=Response)
async def create_message(
    body: MessageRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> Response:
    """Generate the assistant's next turn."""
    _note(body, request, service)
    if body.metadata is not None and body.metadata.user_id is not None:
        request.scope["state"]["user"] = body.metadata.user_id
    given = {name: getattr(body, name) for name in (*SHARED, "max_tokens")}
    given |= {"stop": body.stop_sequences, "thinking_token_budget": body.thinking_token_budget}
    params = sampling_of(given, MessageRequest.model_fields)
    compression = service.compression(body.kv_compression)  # checked before rendering
    check_priority(body.priority, tenant, service.config)
    service.check_room(tenant.name)
    rendered = await _render(body, service, tenant)
    if rendered.num_system is not None:
        count = partial(service.compression, body.kv_compression, rendered.num_system)
        compression = await service.workers.run(tenant.name, count)
    form = format_of(body.offer, service.output_format)
    if form.needs_special_tokens(with_tools=body.offered is not None):
        params = replace(params, skip_special_tokens=False)
    prompt = RequestSpec(
        prompt_token_ids=rendered.token_ids,
        params=params,
        compression=compression,
        priority=body.priority,
        retention=rendered.breakpoints,
        tenant=tenant.name,
        cache_salt=tenant.salt(body.cache_salt),
        may_end_early=True,
        options=http_options(body),
    ).having(rendered.dropped)
    if form.takes_apart(with_tools=body.offered is not None):
        prompt = rewritten(prompt)
    prompt = _compressing_prompt(prompt, rendered, compression or service.engine.served.compression)
    prompt = await _with_grammar(body, form, service, tenant, prompt)
    answer = AnthropicResponse(body, service, request_id_of(request.scope), prompt)
    if body.stream:
        return await stream_events(answer.events(), request)
    return await answer_json(answer.message(), request)


@router.post("/v1/messages/count_tokens", responses=ERRORS)
async def count_tokens(
    body: ConversationFields, request: Request, service: ServiceDep, tenant: TenantDep
) -> TokensCount:
    """Count the prompt tokens of a request to /v1/messages, after the chat template."""
    _note(body, request, service)
    rendered = await _render(body, service, tenant)
    return TokensCount(input_tokens=len(rendered.token_ids))


async def _with_grammar(
    body: MessageRequest, form: OutputFormat, service: Service, tenant: Tenant, prompt: RequestSpec
) -> RequestSpec:
    """Attach the grammar of tools and schema to the prompt. Raises: ApiError."""
    run = partial(service.workers.run, tenant.name)
    given, offer = body.structured, body.offer
    structured = None
    if given is not None:
        structured = await run(partial(checked, given))
        check_grammars(service, given[1].rpartition(".")[0])
    if offer is not None:
        await run(partial(check_offer, offer, form, service))
    continues = body.messages[-1].role == "assistant"
    return await run(partial(with_grammar, form, offer, structured, prompt, continues=continues))


def _compressing_prompt(
    prompt: RequestSpec, rendered: Rendered, compression: CompressionConfig | None
) -> RequestSpec:
    """Without compress_prompt_at, compress up to the last cache breakpoint if the cache is compressed: the
    prefix is reused, so it is compressed once for all. Not if tokens of it leave the cache."""
    snapshots = prompt.option(SnapshotUse) or SnapshotUse()
    if (
        snapshots.compress_prompt_at is not None
        or compression is None
        or compression.max_loss is not None  # covers only short texts after the prefix
        or rendered.dropped is not None
        or not compression.make_policy().eviction_method.evicts
    ):
        return prompt
    ends = [point.num_tokens for point in rendered.breakpoints if point.num_tokens < len(rendered.token_ids)]
    return prompt.having(replace(snapshots, compress_prompt_at=max(ends, default=0) or None))


def _note(body: ConversationFields, request: Request, service: Service) -> None:
    """Check the model's name, and record it for logs and traces. Raises: ApiError 404."""
    request.scope["state"]["model"] = service.check_model(body.model)


async def _render(body: ConversationFields, service: Service, tenant: Tenant) -> Rendered:
    check_size(body, service)
    return await service.workers.run(tenant.name, partial(render, body, service))
