"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, PlainValidator
from starlette.responses import Response

from kvreclaim.chunks import Chunks
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.client import RequestStream
from kvreclaim.engine.serving.core import OutputDelta
from kvreclaim.refusals import Feature
from kvreclaim.server.base.errors import ApiError, refuse_fields
from kvreclaim.server.base.fields import refusal
from kvreclaim.server.base.identity import Tenant, request_id_of
from kvreclaim.server.base.vocabulary import Continuation
from kvreclaim.server.openai.answer import OpenAIResponse, scores_of
from kvreclaim.server.openai.documents import before_prompt, num_chars, reuse_of
from kvreclaim.server.openai.logprobs import Report, completion_logprobs
from kvreclaim.server.openai.prompts import (
    MAX_LOGPROBS,
    GenerationFields,
    beams_of,
    bounded,
    check_options,
    engine_prompt,
    sampling_params,
)
from kvreclaim.server.openai.schemas import ERRORS, Completion, streamed
from kvreclaim.server.openai.structured import structured_of
from kvreclaim.server.shared.bodies import BodyRoute
from kvreclaim.server.shared.service import Service, ServiceDep, TenantDep

router = APIRouter(tags=["openai"], route_class=BodyRoute)

PROMPT_TYPE = str | list[str] | list[int] | list[list[int]]


def _as_list(value: Any) -> list[str] | list[list[int]]:
    """Return one or several prompts as a list."""
    prompts = [value] if isinstance(value, str) or _is_tokens(value) else value
    checks = (_is_text, _is_tokens)
    if isinstance(prompts, list) and prompts and any(all(map(kind, prompts)) for kind in checks):
        return prompts
    raise refusal("it must be text, a list of token ids, or a list of one or more of these")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class CompletionRequest(GenerationFields):
    prompt: Annotated[
        list[str] | list[list[int]], PlainValidator(_as_list, json_schema_input_type=PROMPT_TYPE)
    ]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = None


@router.post("/v1/completions", responses=ERRORS | streamed(Completion), response_class=Response)
async def completions(
    body: CompletionRequest, request: Request, service: ServiceDep, tenant: TenantDep
) -> Response:
    """Continue one or several prompts."""
    check_options(body, service, request.scope)
    service.check_room(tenant.name, len(body.prompt), body.num_sequences)
    answer = CompletionAnswer(
        body, service, request_id_of(request.scope), await _prompts(body, service, tenant)
    )
    return await answer.respond(request)


async def _prompts(body: CompletionRequest, service: Service, tenant: Tenant) -> list[RequestSpec]:
    limit = service.config.default_max_tokens if body.max_tokens is None else body.max_tokens
    refuse_fields({Feature.ECHO: body.echo, Feature.CHUNK_REUSE: body.documents is not None})
    if not limit and not body.echo:
        raise ApiError(
            400, "max_tokens is 0 without echo, so the answer is empty; raise it or set echo.", "max_tokens"
        )
    if body.echo and body.logprobs is not None and body.prompt_logprobs is not None:
        raise ApiError(
            400, "echo with logprobs gives those of the prompt; leave out prompt_logprobs.", "prompt_logprobs"
        )
    more: dict[str, Any] = {"max_tokens": max(1, limit), "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        more["prompt_logprobs"] = body.logprobs
    more["structured_outputs"] = await structured_of(body.structured_outputs, service, tenant)
    beams = beams_of(body, max(1, limit))
    params = sampling_params(body, **more) if beams is None else beams.sampling
    special = body.add_special_tokens is not False

    def encode() -> list[tuple[list[int], Chunks | None]]:
        if body.documents is not None:
            how, documents = reuse_of(body.chunk_reuse), body.documents
            made = partial(before_prompt, documents, how=how, service=service, add_special_tokens=special)
            return [made(prompt) for prompt in body.prompt]
        given = body.prompt
        ids = [service.encode(p, add_special_tokens=special) if isinstance(p, str) else p for p in given]
        return [(each, None) for each in ids]

    for text in body.prompt:
        if isinstance(text, str):
            service.check_chars(len(text), "prompt")
    size = sum(map(len, body.prompt)) + num_chars(body.documents or ())
    made = await service.workers.run(tenant.name, encode, size=size)
    compression = service.compression(body.kv_compression)
    prompts = [
        engine_prompt(tokens, params, body, service, tenant, compression, beams=beams, chunks=chunks)
        for tokens, chunks in made
    ]
    return bounded(prompts, service)


class CompletionAnswer(OpenAIResponse):
    """Choices with `text`; with echo the prompt comes first, in text, tokens and log-probabilities."""

    route = "/v1/completions"
    kind = chunk_kind = "text_completion"
    fields: CompletionRequest

    def __init__(
        self, fields: CompletionRequest, service: Service, request_id: str, prompts: list[RequestSpec]
    ) -> None:
        super().__init__(fields, service, request_id, prompts)
        self._continuations: dict[int, Continuation] = {}

    def choice(self, index: int, delta: OutputDelta, stream: RequestStream) -> dict[str, Any]:
        return self._choice(index, delta, stream, first=True)

    def chunk_choices(
        self, index: int, delta: OutputDelta, stream: RequestStream, *, first: bool
    ) -> list[dict[str, Any]]:
        has_content = delta.text or delta.finish_reason or (first and self.fields.echo)
        is_empty = not has_content and self.fields.logprobs is None and not self.fields.return_token_ids
        return [] if is_empty else [self._choice(index, delta, stream, first=first)]

    def take(self, delta: OutputDelta) -> OutputDelta:
        """Drop the one token that the engine generates even for max_tokens 0."""
        if self.fields.max_tokens != 0:
            return delta
        return OutputDelta(delta.index, finish_reason=delta.finish_reason and "length")

    def usage(self) -> dict[str, Any]:
        """Return the usage; with max_tokens 0 the one sampled token does not count."""
        if self.fields.max_tokens == 0:
            self._metrics = {at: replace(m, num_generated_tokens=0) for at, m in self._metrics.items()}
        return super().usage()

    def _choice(
        self, index: int, delta: OutputDelta, stream: RequestStream, *, first: bool
    ) -> dict[str, Any]:
        fields = self.fields
        choice: dict[str, Any] = {
            "index": index,
            "text": self._text(index, delta, stream, first=first),
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if fields.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, delta, stream, first=first)
        if fields.return_token_ids:
            choice["token_ids"] = delta.token_ids
        choice |= scores_of(delta)
        return choice | self.of_prompt(stream) if first else choice

    def _text(self, index: int, delta: OutputDelta, stream: RequestStream, *, first: bool) -> str:
        """Return the new text; with echo, the prompt comes first."""
        if not self.fields.echo:
            return delta.text
        tokens = stream.new.prompt_token_ids
        continuation = self._continuations.setdefault(index, Continuation(self.vocabulary, tokens))
        text = continuation.take(delta.token_ids, delta.text)
        if not first:
            return text
        given = self.fields.prompt[index // (self.fields.n or 1)]
        if not isinstance(given, str):
            skips = self.vocabulary.skip_special_tokens
            given = str(self.vocabulary.tokenizer.decode(tokens, skip_special_tokens=skips))
        return given + text

    def _logprobs(
        self, index: int, delta: OutputDelta, stream: RequestStream, *, first: bool
    ) -> dict[str, list[Any]]:
        token_ids: list[int] = delta.token_ids
        reports: list[Report | None] = [*(delta.logprobs or ())]
        if first and self.fields.echo:
            assert stream.prompt_logprobs is not None, f"{stream.request_id} echoes with logprobs"
            token_ids, reports = stream.new.prompt_token_ids + token_ids, [*stream.prompt_logprobs, *reports]
        return completion_logprobs(token_ids, reports, self.places[index])
