"""Service shared by the routes of both dialects: prompts into the engine, outputs back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

from fastapi import Depends, Request

from kvreclaim.checks import check_text
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.chat import SYSTEM_ROLES, PlainText, chat_text, variables_of
from kvreclaim.engine.api.exports import Tokenizer
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.client import EngineClient, RequestStream
from kvreclaim.engine.serving.core import Update
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.errors import TOO_LONG, ApiError, failed
from kvreclaim.server.base.fields import KVCompression
from kvreclaim.server.base.identity import Tenant
from kvreclaim.server.base.model_names import known
from kvreclaim.server.base.vocabulary import Vocabulary
from kvreclaim.server.http.workers import Workers, default_threads
from kvreclaim.server.shared.compression import check_budget, compression_of
from kvreclaim.server.shared.output_format import OutputFormat, output_format
from kvreclaim.server.shared.tool_prompt import in_system, in_user, plain_turns, tools_text

logger = logging.getLogger(__name__)

MIN_TOKEN_CHARS = 32
"""Assumed least length of the longest token: some tokenizers drop characters."""


class ConcurrencyLimiter:
    """Limits outputs per request, and running outputs per key. Counts outputs, prompts × n, from queueing to
    their end."""

    def __init__(self, config: ServerConfig) -> None:
        self.per_request = config.max_outputs_per_request
        self.per_key = outputs_per_key(config)
        self.taken: Counter[str | None] = Counter()

    def check(self, tenant: str | None, num_prompts: int, n: int) -> None:
        """Raises: ApiError 400 above the per-request limit, 429 while the key's limit is reached."""
        total, limit = num_prompts * n, self.per_request
        if self.per_key is not None:
            limit = min(limit, self.per_key)
        if total > limit:
            raise ApiError(
                400,
                f"the request asks for {total} outputs ({num_prompts} prompts, n {n}), at most {limit} are "
                "allowed at once; split it.",
                param="prompt" if num_prompts > 1 else "n",
            )
        if self.per_key is not None and self.taken[tenant] + total > self.per_key:
            raise ApiError(
                429,
                f"{self.taken[tenant]} outputs of this key wait or run, the limit is {self.per_key}; "
                "try again when some have ended.",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )

    @contextmanager
    def take(self, tenant: str | None, num_outputs: int) -> Iterator[None]:
        """Count the outputs until the end of the block."""
        self.taken[tenant] += num_outputs
        try:
            yield
        finally:
            self.taken[tenant] -= num_outputs
            if not self.taken[tenant]:
                del self.taken[tenant]


def outputs_per_key(config: ServerConfig) -> int | None:
    """Return the operator's limit; with several keys, half of the queue, so that no key can fill it."""
    if config.max_concurrent_outputs_per_key is not None or len(config.api_keys) < 2:
        return config.max_concurrent_outputs_per_key
    return max(1, config.max_queue_len // 2)


class Service:
    """One model behind the routes.

    streams_of: running engine requests, by the id of the HTTP request
    """

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.draining = asyncio.Event()
        self.started_s = time.time()
        self.streams_of: dict[str, list[RequestStream]] = {}
        self.workers = Workers(default_threads())
        self.room = ConcurrencyLimiter(config)
        self.plain: PlainText | None = None
        if engine.tokenizer is not None:
            self.plain = PlainText(engine.tokenizer, allow=config.allow_special_tokens_in_text)
        self.max_chars = self.longest * longest_token(engine.tokenizer)

    @property
    def max_model_len(self) -> int:
        return self.engine.served.max_model_len

    @property
    def longest(self) -> int:
        """Return the longest length of any request, including those with their own compression."""
        return self.engine.served.longest

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises: InvalidArgumentError if there is none."""
        if self.engine.tokenizer is None:
            raise InvalidArgumentError(f"{self.engine.name} has no tokenizer; pass prompts as token ids.")
        return self.engine.tokenizer

    @cached_property
    def output_format(self) -> OutputFormat:
        """Format of the model's outputs. Raises: InvalidArgumentError if there is no tokenizer."""
        return output_format(self.tokenizer, self.config)

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template reads a variable."""
        return variable in variables_of(self.output_format.template)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Spellings in texts without special tokens. Raises: InvalidArgumentError if there is no
        tokenizer."""
        return Vocabulary(self.tokenizer)

    @cached_property
    def whole_vocabulary(self) -> Vocabulary:
        """Spellings in texts with special tokens."""
        return Vocabulary(self.tokenizer, skip_special_tokens=False)

    @cached_property
    def follows_grammars(self) -> bool:
        """Whether answers of this model can follow a grammar."""
        from kvreclaim.engine.features.structured_outputs.grammar import can_read

        return self.engine.served.has_end and can_read(self.engine.tokenizer)

    def check_model(self, model: str) -> str:
        """Return the name if it is one of the model's. Raises: ApiError 404."""
        return known(model, self.config.served_model_name)

    def check_room(self, tenant: str | None, num_new: int = 1, n: int | None = None) -> None:
        """Raises: ApiError 429 if the queue is full, 400 if that many could never be queued, 503 during
        shutdown. n: outputs of each prompt."""
        if self.draining.is_set():
            raise ApiError(503, "the server is shutting down; send the request to another one.")
        self.room.check(tenant, num_new, n or 1)
        waiting, most = self.engine.num_queued, self.config.max_queue_len
        if num_new > most:
            raise ApiError(
                400, f"the request has {num_new} prompts, the queue holds {most}; split it.", param="prompt"
            )
        if waiting + num_new > most:
            raise ApiError(
                429,
                f"{waiting} requests wait already, the limit is {most}; try later.",
                code="queue_full",
                headers={"retry-after": "1"},
            )

    def check_chars(self, num_chars: int, param: str) -> None:
        """Raises: ApiError 400 for more text than the longest tokens could cover."""
        if num_chars > self.max_chars:
            raise ApiError(
                400,
                f"{param} has {num_chars} characters, but max_model_len is {self.longest} tokens, "
                f"which have {self.max_chars} at most; shorten it.",
                param=param,
                code=TOO_LONG,
            )

    def check_messages(self, num_messages: int, num_chars: int, param: str = "messages") -> None:
        """Raises: ApiError 400 for a conversation that cannot fit, before it is rendered."""
        if num_messages > self.longest:
            raise ApiError(
                400,
                f"there are {num_messages} messages or blocks, but max_model_len is {self.longest} "
                "tokens; leave some out.",
                param=param,
                code=TOO_LONG,
            )
        self.check_chars(num_chars, param)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text prompt. Raises: ApiError 400 for a text that cannot fit, before it is encoded."""
        self.check_chars(len(text), "prompt")
        check_text("the prompt", text, "prompt")
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def render(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        text = text_of(self, messages, **options)
        assert self.plain is not None, "a model without tokenizer is refused"
        return self.plain.encode(text)

    def compression(
        self, given: KVCompression | None, num_system: Callable[[], int] | None = None
    ) -> CompressionConfig | None:
        """Resolve a request's `kv_compression`; None: the server's own. Raises: ApiError 400.

        num_system: counts the prompt's leading tokens that are system prompt and tools; None: it has none
        """
        own = None if given is None else compression_of(given, self.engine.served, self.config)
        config = self.engine.served.compression if own is None else own
        if num_system is None or config is None or not config.protect_system:
            return own
        return config.protecting(num_system(), self.engine.served.block_size)

    @asynccontextmanager
    async def submit(self, request_id: str, prompts: list[RequestSpec]) -> AsyncIterator[list[RequestStream]]:
        """Queue one request per prompt, all or none; those still running at the end of the block are aborted.

        Their ids are request_id, or request_id-0, request_id-1, ... for several.
        """
        tenant, n = prompts[0].tenant, prompts[0].num_sequences
        self.check_room(tenant, len(prompts), n)
        if self.config.max_kv_budget is not None:
            for prompt in prompts:
                check_budget(prompt, self.engine.served, self.config.max_kv_budget)
        with self.room.take(tenant, len(prompts) * n):
            async with self._queued(request_id, prompts) as streams:
                yield streams

    @asynccontextmanager
    async def _queued(
        self, request_id: str, prompts: list[RequestSpec]
    ) -> AsyncIterator[list[RequestStream]]:
        one = len(prompts) == 1
        news = [
            replace(prompt, request_id=request_id if one else f"{request_id}-{index}")
            for index, prompt in enumerate(prompts)
        ]
        streams = await self.engine.add_all(news)
        self.streams_of[request_id] = streams
        try:
            yield streams
        finally:
            for stream in streams:
                if not stream.ended:
                    self.engine.abort(stream.request_id)


def text_of(
    service: Service,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> str:
    """Render a conversation through the chat template, for `plain` to encode, which escapes users' text."""
    if service.config.system and not (messages and messages[0]["role"] in SYSTEM_ROLES):
        messages = [{"role": "system", "content": service.config.system}, *messages]
    given: tuple[Any, ...] = (messages, tools, template_kwargs)
    if service.plain is not None:  # without a tokenizer chat_text raises
        given = tuple(map(service.plain.guard, given))
    options |= {"template_kwargs": given[2], "chat_template": service.config.chat_template}
    if service.plain is not None and service.output_format.writes_tools:
        return _with_tools(service, given[0], given[1] or [], options)
    return chat_text(service.engine, given[0], tools=given[1], **options)


def _with_tools(
    service: Service, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]
) -> str:
    """Render for a template without tools: put them into the system prompt or, if it has none either, before
    the first user text."""
    lead, knows_calls = tools_text(tools), "tool_calls" in service.output_format.template
    turns = messages if knows_calls and not lead else plain_turns(messages)
    if not lead:
        return chat_text(service.engine, turns, **options)
    try:
        text = chat_text(service.engine, in_system(turns, lead), **options)
    except InvalidArgumentError:
        text = ""
    return text if lead in text else chat_text(service.engine, in_user(turns, lead), **options)


def longest_token(tokenizer: Tokenizer | None) -> int:
    """Return the most characters of a token."""
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    return max(MIN_TOKEN_CHARS, *map(len, vocabulary), 0)


def check_update(stream: RequestStream, update: Update) -> None:
    """Raises: InvalidArgumentError if the request's options contradict each other; ApiError 500 if it failed,
    with the id under which the cause is logged."""
    if update.refusal is not None:
        raise update.refusal
    if update.error is not None:
        logger.error("request %s failed in the engine", stream.request_id)
        raise failed(stream.request_id)


def service_of(request: Request) -> Service:
    """The app's service."""
    service: Service = request.app.state.service
    return service


def tenant_of(request: Request) -> Tenant:
    """The tenant of a request."""
    tenant: Tenant = request.scope["state"]["tenant"]
    return tenant


ServiceDep = Annotated[Service, Depends(service_of)]
TenantDep = Annotated[Tenant, Depends(tenant_of)]
