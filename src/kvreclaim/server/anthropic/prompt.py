"""Renders a conversation to token ids and locates its cache breakpoints.

A breakpoint covers everything that the chat template writes before the first change caused by what follows
the marked block in the order tools, system, messages. To find it, the conversation is rendered again with
everything after the block altered; the breakpoint lies where the two texts diverge. If the template writes
tools after the system prompt, a breakpoint on a tool covers the system prompt as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from kvreclaim.engine.api.chat import Change, num_leading_tokens, num_shared
from kvreclaim.engine.api.exports import Retention
from kvreclaim.engine.features.drops.feature import DroppedSpans
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.anthropic.conversation import ALTERED, Mark, Writer, check_drops, first_new
from kvreclaim.server.anthropic.fields import (
    TTL_S,
    AnyBlock,
    ConversationFields,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.shared.bodies import num_chars
from kvreclaim.server.shared.calls import check_unique
from kvreclaim.server.shared.drops import DropMarks
from kvreclaim.server.shared.service import Service, text_of

MAX_BREAKPOINTS = 4
EXTRA_TOOL = {"type": "function", "function": {"name": ALTERED, "description": ALTERED, "parameters": {}}}


@dataclass(frozen=True, slots=True)
class Rendered:
    """breakpoints: in the order of the request; num_tokens counts whole tokens. num_system: counts leading
    tokens of system prompt and tools; None: there are none. dropped: tokens that leave the cache."""

    token_ids: list[int]
    breakpoints: tuple[Retention, ...]
    num_system: Callable[[], int] | None = None
    dropped: DroppedSpans | None = None


def check_size(body: ConversationFields, service: Service) -> None:
    """Raises: ApiError 400 for a conversation that cannot fit."""
    blocks = [block for message in body.messages for block in message.content]
    texts = [*map(_texts, body.system or ()), *map(_texts, blocks)]
    service.check_messages(max(len(body.messages), len(blocks)), num_chars(texts))
    tools = [] if body.offered is None else body.tools or []
    service.check_chars(num_chars([[tool.description, tool.input_schema] for tool in tools]), "tools")


def _texts(block: AnyBlock) -> Any:
    """Parts of a block that a template may write."""
    match block:
        case ToolUseBlock(name=name, input=given):
            return [name, given]
        case ThinkingBlock(thinking=thought):
            return thought
        case ToolResultBlock(content=content):
            return [part.text for part in content]
    return block.text


def render(body: ConversationFields, service: Service) -> Rendered:
    """Render the prompt of the next turn. Raises: ApiError, InvalidArgumentError."""
    _check_tools(body)
    _check_thinking(body, service)
    drops = check_drops(body)
    writer = Writer(body)
    tools, messages = writer.tools(), writer.messages()
    marks = _marks(body, writer.marks, writer.place)
    text = _text(body, service, tools, messages)
    assert service.plain is not None, "a model without tokenizer is refused"
    dropped = _dropped(body, service, text) if drops else None
    if not marks:
        return _counted(Rendered(service.plain.encode(text), (), dropped=dropped), body, service)
    token_ids, ends = service.plain.encode_with_ends(text)
    chars: dict[int, int] = {0: 0, writer.place: len(text)}
    for place in {mark.place for mark in marks} - chars.keys():
        altered = Writer(body, intact=place)
        others = altered.tools()
        chars[place] = num_shared(text, _text(body, service, others, altered.messages()))
        if place <= len(tools):
            alone = num_shared(text, _text(body, service, [*others, EXTRA_TOOL], messages))
            chars[place] = max(chars[place], alone)
    points = [Retention(bisect_right(ends, chars[mark.place]), TTL_S[mark.ttl]) for mark in marks]
    return _counted(Rendered(token_ids, tuple(points), dropped=dropped), body, service)


def _dropped(body: ConversationFields, service: Service, text: str) -> DroppedSpans:
    """Tokens of texts that leave the cache. text: the prompt. Raises: ApiError."""
    drops = DropMarks()
    writer = Writer(body, drops=drops, new=first_new(body))
    tools = writer.tools()
    return drops.read(text, _text(body, service, tools, writer.messages()), service)[1]


def _counted(found: Rendered, body: ConversationFields, service: Service) -> Rendered:
    """Add the counter of system prompt and tools."""
    if body.system is None and not body.tools and not service.config.system:
        return found
    assert service.plain is not None, "a model without tokenizer is refused"
    encode = service.plain.encode

    def render(change: Change) -> str:
        writer = Writer(body)
        tools = writer.tools()
        return _text(body, service, tools, change(writer.messages()))

    return replace(found, num_system=partial(num_leading_tokens, found.token_ids, render, encode))


def _text(
    body: ConversationFields, service: Service, tools: list[dict[str, Any]], messages: list[dict[str, Any]]
) -> str:
    """Render the conversation; a last assistant message is left open."""
    prefill = body.messages[-1].role == "assistant"
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        if "enable_thinking" in variables:
            raise ApiError(
                400, "thinking and chat_template_kwargs.enable_thinking are both set; leave one out."
            )
        if body.thinking.type == "disabled" or service.template_reads("enable_thinking"):
            variables["enable_thinking"] = body.thinking.type != "disabled"
    try:
        return text_of(
            service,
            messages,
            tools=tools,
            add_generation_prompt=not prefill,
            continue_final_message=prefill,
            template_kwargs=variables,
        )
    except InvalidArgumentError as error:
        if body.thinking is not None and error.field == "template_kwargs.enable_thinking":
            raise ApiError(
                400,
                "thinking is 'disabled', but the model's chat template has no switch for it "
                "(enable_thinking); leave thinking out.",
            ) from error
        raise


def _check_thinking(body: ConversationFields, service: Service) -> None:
    """Raises: ApiError for reasoning without a reasoning parser."""
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled":
        return
    if service.output_format.reasoning_parser is None:
        raise ApiError(
            400,
            f"thinking is {thinking.type!r}, but this server knows no reasoning of this model (its chat "
            "template shows none, or --reasoning-parser is none); leave thinking out.",
        )


def _check_tools(body: ConversationFields) -> None:
    """Raises: ApiError for tool fields that contradict each other or have no effect."""
    names = [tool.name for tool in body.tools or ()]
    check_unique(names)
    choice = body.tool_choice
    if choice is not None and choice.type in ("any", "tool") and not names:
        raise ApiError(400, f"tool_choice is {choice.type!r}, but there are no tools; leave it out.")
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        verb = "is missing; pass a tool's" if choice.name is None else "is for the type tool; leave it out"
        raise ApiError(400, f"tool_choice.name {verb}.")
    if choice is not None and choice.name is not None and choice.name not in names:
        raise ApiError(
            400, f"tool_choice.name is {choice.name[:80]!r}, which none of the tools has; pass one of theirs."
        )
    last = body.messages[-1]
    if last.role == "assistant" and last.content[-1].type != "text":
        raise ApiError(
            400,
            f"messages.{len(body.messages) - 1} ends with a {last.content[-1].type}, which cannot be "
            "continued; add text, or the tool_result of a tool_use.",
        )


def _marks(body: ConversationFields, marks: list[Mark], last: int) -> list[Mark]:
    """Breakpoints, including the automatic one. Raises: ApiError for too many, or in a wrong order."""
    if body.cache_control is not None:
        ttl = body.cache_control.ttl
        same = [mark for mark in marks if mark.place == last]
        if any(mark.ttl != ttl for mark in same):
            raise ApiError(
                400,
                f"cache_control has ttl {ttl}, but the last block's own has {same[-1].ttl}; leave one out.",
            )
        marks = marks if same else [*marks, Mark(last, ttl, "cache_control")]
    if len(marks) > MAX_BREAKPOINTS:
        raise ApiError(
            400,
            f"cache_control is set {len(marks)} times, at most {MAX_BREAKPOINTS} are allowed; remove the one "
            f"of {marks[MAX_BREAKPOINTS].where}.",
        )
    for before, after in pairwise(marks):
        if TTL_S[after.ttl] > TTL_S[before.ttl]:
            raise ApiError(
                400,
                f"cache_control of {after.where} has ttl {after.ttl} after one of {before.ttl} "
                f"({before.where}); in the order tools, system, messages the longer ones come first.",
            )
    return marks
