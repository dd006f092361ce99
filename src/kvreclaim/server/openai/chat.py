"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from kvreclaim.chunks import Chunks
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.chat import Change
from kvreclaim.engine.features.drops.feature import DroppedSpans
from kvreclaim.engine.features.snapshots.feature import rewritten
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.client import RequestStream
from kvreclaim.engine.serving.core import OutputDelta
from kvreclaim.parsers.formats import Splitter
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text, ToolCall, merged
from kvreclaim.refusals import Feature
from kvreclaim.server.base.config import MAX_INT32
from kvreclaim.server.base.errors import ApiError, refuse_fields
from kvreclaim.server.base.fields import Listed
from kvreclaim.server.base.identity import Tenant, request_id_of
from kvreclaim.server.openai.answer import OpenAIResponse, scores_of
from kvreclaim.server.openai.documents import DocumentPlaces, reuse_of, within_chat
from kvreclaim.server.openai.logprobs import chat_logprobs
from kvreclaim.server.openai.messages import (
    ConversationOptions,
    Messages,
    rendered,
    system_counter,
    with_drops,
)
from kvreclaim.server.openai.prompts import (
    MAX_LOGPROBS,
    GenerationFields,
    Verbosity,
    beams_of,
    bounded,
    check_options,
    engine_prompt,
    sampling_params,
)
from kvreclaim.server.openai.schemas import ERRORS, ChatCompletion, streamed
from kvreclaim.server.openai.structured import ResponseFormat, structured_of
from kvreclaim.server.openai.tool_choice import ToolChoice, offer_of
from kvreclaim.server.shared.bodies import BodyRoute
from kvreclaim.server.shared.calls import ToolOffer, check_offer, format_of, is_structured_only, with_grammar
from kvreclaim.server.shared.service import Service, ServiceDep, TenantDep

REASONING = ("reasoning_content", "reasoning")
"""Names of the reasoning: most clients read the first, vLLM writes the second."""


def whole_message(pieces: Iterable[Piece]) -> dict[str, Any]:
    """content is null if there are only calls; empty reasoning_content, reasoning and tool_calls are
    omitted."""
    parts = merged(pieces)
    text = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [_call(part.id, part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if reasoning:
        message |= dict.fromkeys(REASONING, reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


class MessageChunks:
    """Deltas of one output: a call's first one has its id and name, all have a part of its arguments."""

    def __init__(self) -> None:
        self._num_begun = 0

    def write(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            match piece:
                case Text(text):
                    self._add(deltas, "content", text)
                case Reasoning(text):
                    self._add(deltas, REASONING[0], text)
                case CallBegin(name, call_id):
                    self._num_begun += 1
                    self._add_call(deltas, _call(call_id, name, ""))
                case Arguments(text):
                    self._add_call(deltas, {"function": {"arguments": text}})
                case CallEnd():
                    pass
        for delta in deltas:
            if REASONING[0] in delta:
                delta |= dict.fromkeys(REASONING, delta[REASONING[0]])
        return deltas

    def _add(self, deltas: list[dict[str, Any]], field: str, text: str) -> None:
        if deltas and field in deltas[-1]:
            deltas[-1][field] += text
        else:
            deltas.append({field: text})

    def _add_call(self, deltas: list[dict[str, Any]], part: dict[str, Any]) -> None:
        if not (deltas and "tool_calls" in deltas[-1]):
            deltas.append({"tool_calls": []})
        calls = deltas[-1]["tool_calls"]
        index = self._num_begun - 1
        if calls and calls[-1]["index"] == index:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        else:
            calls.append({"index": index, **part})


def _call(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id or f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


router = APIRouter(tags=["openai"], route_class=BodyRoute)


class ChatRequest(GenerationFields, ConversationOptions):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[Listed[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    prediction: dict[str, Any] | None = None
    verbosity: Verbosity | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_INT32)
    response_format: ResponseFormat | None = None

    @property
    def offered(self) -> dict[str, dict[str, Any]] | None:
        """Parameter schemas of the functions in the prompt; None: no functions."""
        if not self.tools or self.tool_choice == "none":
            return None
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    @property
    def offer(self) -> ToolOffer | None:
        """Functions that the answer may call; None: none. Raises: ApiError naming the field."""
        if not self.tools and self.tool_choice is None:
            return None
        tools = [] if self.offered is None else self.tools or []
        return offer_of(tools, self.tool_choice, one_call=self.parallel_tool_calls is False)


@router.post("/v1/chat/completions", responses=ERRORS | streamed(ChatCompletion), response_class=Response)
async def chat_completions(
    body: ChatRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> Response:
    """Generate the assistant's next turn."""
    check_options(body, service, request.scope)
    _check(body)
    service.check_room(tenant.name, n=body.num_sequences)
    prompt = await prompt_of(body, service, tenant)
    return await ChatAnswer(body, service, request_id_of(request.scope), [prompt]).respond(request)


def _check(body: ChatRequest) -> None:
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; pass one of them.", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(
            400, "top_logprobs is set, but logprobs is not true; set it or remove it.", "top_logprobs"
        )


async def prompt_of(body: ChatRequest, service: Service, tenant: Tenant) -> RequestSpec:
    """Build the engine's request. Raises: ApiError naming the field."""
    limit = body.max_completion_tokens or body.max_tokens
    beams = beams_of(body, limit or service.longest)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    structured = None
    if body.structured_outputs is not None or body.response_format is not None:
        structured = await structured_of(body.structured_outputs, service, tenant, body.response_format)
    offer, form = body.offer, format_of(body.offer, service.output_format)
    if offer is not None:
        given = body.structured_outputs is not None
        refuse_fields({Feature.STRUCTURED_OUTPUTS: given, Feature.FORCED_CALLS: offer.forced})
        await service.workers.run(tenant.name, partial(check_offer, offer, form, service))
    if beams is None:
        more = {"logprobs": logprobs, "thinking_token_budget": body.thinking_token_budget}
        params = sampling_params(body, max_tokens=limit, **more)
    else:
        field = None if offer is None else offer.field
        if structured is not None:
            field = "structured_outputs" if body.structured_outputs else "response_format"
        refuse_fields({Feature.BEAM_SEARCH: True, Feature.STRUCTURED_OUTPUTS: field}, field)
        params = beams.sampling
    with_tools = body.offered is not None
    work = partial(_encoded, body, service, with_tools=with_tools)
    ids, chunks, dropped, compression = await service.workers.run(tenant.name, work)
    if body.skip_special_tokens is None and form.needs_special_tokens(with_tools=with_tools):
        params = replace(params, skip_special_tokens=False)
    prompt = engine_prompt(ids, params, body, service, tenant, compression, beams=beams, chunks=chunks)
    prompt = prompt.having(dropped)
    if form.takes_apart(with_tools=with_tools):
        prompt = rewritten(prompt)
    follow = partial(with_grammar, form, offer, structured, continues=bool(body.continue_final_message))
    return bounded([await service.workers.run(tenant.name, partial(follow, prompt))], service)[0]


def _encoded(
    body: ChatRequest, service: Service, *, with_tools: bool
) -> tuple[list[int], Chunks | None, DroppedSpans | None, CompressionConfig | None]:
    """Return the prompt's tokens, its documents or dropped texts, and its compression."""
    chunks = dropped = None
    if body.documents is None:
        write = partial(_written, body, service, with_tools)
        ids, dropped = with_drops(body.messages, write, service)
    else:
        _check_whole(body)
        place = DocumentPlaces()
        text = rendered(body.messages, body, service, with_tools=with_tools, change=place.marked)
        ids, chunks = within_chat(body.documents, text, place.mark, reuse_of(body.chunk_reuse), service)
    num_system = system_counter(ids, body.messages, body, service, with_tools=with_tools)
    return ids, chunks, dropped, service.compression(body.kv_compression, num_system)


def _written(body: ChatRequest, service: Service, with_tools: bool, change: Change) -> str:
    return rendered(body.messages, body, service, with_tools=with_tools, change=change)


def _check_whole(body: ChatRequest) -> None:
    """Raises: ApiError for messages that are dropped next to documents."""
    lossy = (f"messages.{n}.kv_drop" for n, message in enumerate(body.messages) if message.kv_drop == "lossy")
    place = next(lossy, None)
    refuse_fields({Feature.CHUNK_REUSE: True, Feature.LOSSY_DROP: place}, place)


class ChatAnswer(OpenAIResponse):
    """Choices with a `message`, or chunks with a `delta`; the first delta has the role."""

    route = "/v1/chat/completions"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    fields: ChatRequest

    def __init__(
        self, fields: ChatRequest, service: Service, request_id: str, prompts: list[RequestSpec]
    ) -> None:
        super().__init__(fields, service, request_id, prompts)
        self._one_call = fields.parallel_tool_calls is False
        self._splitters: defaultdict[int, Splitter] = defaultdict(self.splitter)
        self._chunks_of: defaultdict[int, MessageChunks] = defaultdict(MessageChunks)

    def splitter(self) -> Splitter:
        """Make the splitter of one output; a purely structured output stays whole."""
        prompt = self.prompts[0]
        if is_structured_only(prompt):
            return Splitter()
        form, tools = format_of(self.fields.offer, self.service.output_format), self.fields.offered
        return form.splitter(prompt.prompt_token_ids, tools, one_call=self._one_call)

    def choice(self, index: int, delta: OutputDelta, stream: RequestStream) -> dict[str, Any]:
        message = whole_message(self.split(index, delta))
        return self.about(index, delta) | {"message": message}

    def chunk_choices(
        self, index: int, delta: OutputDelta, stream: RequestStream, *, first: bool
    ) -> list[dict[str, Any]]:
        parts = self._chunks_of[index].write(self.split(index, delta))
        tokens = delta.token_ids and (self.fields.logprobs or self.fields.return_token_ids)
        if not parts and (tokens or delta.finish_reason):
            parts = [{}]
        choices = [{"index": index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts]
        if choices:
            choices[-1] |= self.about(index, delta)
        if first:
            role = {"role": "assistant", "content": ""}
            choices.insert(0, {"index": index, "delta": role, "logprobs": None, "finish_reason": None})
        return choices

    def extras(self, stream: RequestStream) -> dict[str, Any]:
        return self.of_prompt(stream)

    def about(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        """Return all fields except the content."""
        reason: str | None = delta.finish_reason
        ends = reason == "stop" and delta.stop_reason is None
        if (ends or (reason and self._one_call)) and self._splitters[index].num_calls:
            reason = "tool_calls"
        logprobs = None
        if self.fields.logprobs:
            top = self.fields.top_logprobs or 0
            logprobs = chat_logprobs(delta.token_ids, delta.logprobs or (), top, self.places[index])
        about: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": reason}
        about["stop_reason"] = delta.stop_reason
        if self.fields.return_token_ids:
            about["token_ids"] = delta.token_ids
        return about | scores_of(delta)

    def split(self, index: int, delta: OutputDelta) -> list[Piece]:
        return self._splitters[index].take(delta.text, last=delta.finish_reason is not None)
