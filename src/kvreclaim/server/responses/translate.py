"""Translates a request of the Responses API to a chat request, and errors of chat to this API's field
names."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from kvreclaim.engine.api.chat import SYSTEM_ROLES
from kvreclaim.errors import KVReclaimError
from kvreclaim.refusals import Feature
from kvreclaim.server.base.errors import ApiError, from_engine, from_problem, refuse_fields
from kvreclaim.server.base.identity import Tenant
from kvreclaim.server.openai.chat import ChatAnswer, ChatRequest
from kvreclaim.server.openai.messages import render
from kvreclaim.server.openai.prompts import SharedFields
from kvreclaim.server.responses.conversation import ChatWriter, num_chars
from kvreclaim.server.responses.fields import AllowedFunctions, ChosenFunction, FlatFunction, ResponsesRequest
from kvreclaim.server.responses.items import Item, response_of
from kvreclaim.server.responses.store import ResponseStore
from kvreclaim.server.shared.calls import Tool, can_follow
from kvreclaim.server.shared.service import Service

OWN: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
"""Fields of a chat request and their names in this API; the first match counts."""
OF_MESSAGE: Mapping[str, str] = {"content": "content", "tool_call_id": "call_id", "kv_drop": "kv_drop"}
SAME = (
    *SharedFields.model_fields,
    *("parallel_tool_calls", "top_logprobs", "chat_template_kwargs", "thinking_token_budget"),
)
"""Fields with the same meaning in both APIs."""
MOST_ALONE = 128
"""Most functions with individually checked schemas; OpenAI's own limit."""
ROOM = 8
"""Fraction of the context reserved for an answer without a limit, if items are dropped."""


@contextmanager
def own_names(places: Sequence[str] = ()) -> Iterator[None]:
    """Rename fields in errors raised in the block. places: locations of the chat's messages.

    Raises: ApiError.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _renamed(from_problem(first["type"], first["loc"], first["msg"]), places) from None
    except KVReclaimError as error:
        raise _renamed(from_engine(error, ChatAnswer.route), places) from error
    except ApiError as error:
        raise _renamed(error, places) from error


def _renamed(error: ApiError, places: Sequence[str]) -> ApiError:
    return error if error.param is None else error.about(_own(error.param, places))


def _own(field: str, places: Sequence[str]) -> str:
    if found := re.match(r"messages\.(\d+)(?:\.(\w+))?", field):
        place, part = places[int(found[1])], OF_MESSAGE.get(found[2])
        return f"{place}.{part}" if part and place.startswith("input.") else place
    if found := re.match(r"tools\.\d+(\.function)\b", field):
        return field[: found.start(1)] + field[found.end(1) :]
    chat = next((name for name in OWN if field == name or field.startswith(f"{name}.")), None)
    return field if chat is None else OWN[chat] + field.removeprefix(chat)


def fitting(items: Sequence[Item], fits: Callable[[list[int]], bool | None]) -> list[int]:
    """Return the indices of the items that stay: leading system and developer items, and the latest others
    that fit; if none do, the fewest that can be rendered.

    fits: whether the items at these indices fit, None if they cannot be rendered; monotonic in their number
    """
    first = _num_leading(items)
    cuts = _cuts(items, first)

    def kept(cut: int) -> list[int]:
        return [*range(first), *range(cut, len(items))]

    found: dict[int, bool | None] = {}

    def ends(cut: int) -> bool:
        found[cut] = fits(kept(cut))
        return found[cut] is not False

    place = bisect_left(cuts, True, key=ends)
    if place == len(cuts) or found[cuts[place]] is None:
        place = max(place - 1, 0)
    return kept(cuts[place])


def _num_leading(items: Sequence[Item]) -> int:
    others = (place for place, item in enumerate(items) if item.get("role") not in SYSTEM_ROLES)
    return next(others, len(items))


def _cuts(items: Sequence[Item], first: int) -> list[int]:
    """Possible starts of the rest: unchanged, at each user message, and after the last of these before any
    item except results with a missing call."""
    user_turns = [place for place in range(first + 1, len(items)) if items[place].get("role") == "user"]
    last = user_turns[-1] if user_turns else first
    calls: dict[str, int] = {}
    call_of: dict[int, int] = {}
    for place, item in enumerate(items):
        if item["type"] == "function_call":
            calls[item["call_id"]] = place
        elif item["type"] == "function_call_output":
            call_of[place] = calls.get(item["call_id"], place)
    needed, behind = len(items), []
    for place in range(len(items) - 1, last, -1):
        needed = min(needed, call_of.get(place, needed))
        if needed >= place:
            behind.append(place)
    return [first, *user_turns, *reversed(behind)]


@dataclass(frozen=True, slots=True)
class Translated:
    """items: all that the response answers, including earlier turns; places: locations of the chat's
    messages, for errors"""

    body: ResponsesRequest
    chat: ChatRequest
    items: list[Item]
    places: Sequence[str]


def translated(body: ResponsesRequest, service: Service, store: ResponseStore, tenant: Tenant) -> Translated:
    """Raises: ApiError naming the field."""
    _check(body)
    body = _with_strict(body, service)
    before = _earlier(body.previous_response_id, store, tenant)
    own = _resolved(body.input, store, tenant)
    _check_ids(before, own)
    items = [*before, *own]
    places = ["previous_response_id"] * len(before) + [f"input.{number}" for number in range(len(own))]
    kept = list(range(len(items)))
    if body.truncation == "auto":
        kept = fitting(items, partial(_fits, body, items, places, service))
    service.check_chars(num_chars(items[place] for place in kept), "input")  # before long texts are joined
    chat, named = _chat(body, items, places, kept)
    return Translated(body, chat, items, named)


def _chat(
    body: ResponsesRequest, items: list[Item], places: list[str], kept: Iterable[int]
) -> tuple[ChatRequest, list[str]]:
    """Return the chat of these items, and the locations of its messages. Raises: ApiError."""
    writer = ChatWriter()
    if body.instructions is not None:
        writer.add_texts("system", [body.instructions], "instructions")
    for place in kept:
        writer.write(items[place], places[place])
    with own_names(writer.places):
        return ChatRequest.model_validate({**_options(body), "messages": writer.done()}), writer.places


def _fits(
    body: ResponsesRequest, items: list[Item], places: list[str], service: Service, kept: list[int]
) -> bool | None:
    """Whether the prompt of these items and an answer fit into the context; None: the chat template refuses
    them. Raises: ApiError."""
    longest = service.max_model_len
    if num_chars(items[place] for place in kept) > service.max_chars or len(kept) > longest:
        return False
    chat, named = _chat(body, items, places, kept)
    try:
        with own_names(named):
            ids = render(chat.messages, chat, service, with_tools=chat.offered is not None)
    except ApiError as error:
        if error.param != "input":
            raise
        return None if error.code is None else False
    return len(ids) + (body.max_output_tokens or longest // ROOM) <= longest


def _check(body: ResponsesRequest) -> None:
    is_cut, has_documents = body.truncation == "auto", body.documents is not None
    refuse_fields({Feature.TRUNCATION: is_cut, Feature.CHUNK_REUSE: has_documents})
    if body.top_logprobs is not None and not body.with_logprobs:
        raise ApiError(
            400,
            "top_logprobs is set, but include lacks message.output_text.logprobs; add it, or leave "
            "top_logprobs out.",
            "top_logprobs",
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400, "stream_options is set, but stream is not; set stream or leave it out.", "stream_options"
        )


def _with_strict(body: ResponsesRequest, service: Service) -> ResponsesRequest:
    """Set `strict` of each function that leaves it open: true if its schema can be followed together with the
    others; for many functions, all or none."""
    tools, form = body.tools or [], service.output_format
    hidden = body.skip_special_tokens and form.needs_special_tokens(with_tools=True)
    if body.tool_choice == "none" or all(tool.strict is not None for tool in tools):
        return body

    def follows(given: Iterable[FlatFunction]) -> bool:
        of_chat = [Tool(each.name, each.parameters or {}, bool(each.strict), "tools") for each in given]
        return not hidden and can_follow(of_chat, form, service)

    def filled(tool: FlatFunction, strict: bool) -> FlatFunction:
        return tool if tool.strict is not None else tool.model_copy(update={"strict": strict})

    made = [filled(tool, True) for tool in tools]
    if not follows(made):
        few = len(tools) <= MOST_ALONE
        made = [filled(tool, few and follows([filled(tool, True)])) for tool in tools]
        made = made if few and follows(made) else [filled(tool, False) for tool in tools]
    return body.model_copy(update={"tools": made})


def _earlier(response_id: str | None, store: ResponseStore, tenant: Tenant) -> list[Item]:
    """Items of an earlier response: its input and its output."""
    if response_id is None:
        return []
    kept = store.get(tenant.name, response_id)
    if kept is None:
        raise ApiError(
            400,
            f"previous_response_id {response_id!r} names no stored response; send the conversation as input.",
            "previous_response_id",
            "previous_response_not_found",
        )
    items: list[Item] = from_json(kept.input)["items"] + from_json(kept.response)["output"]
    return items


def _resolved(items: list[Item], store: ResponseStore, tenant: Tenant) -> list[Item]:
    """Replace references by their items."""
    known: dict[str, Item] = {}

    def item_of(reference: str, place: int) -> Item:
        response_id = response_of(reference)
        if reference not in known and response_id is not None:
            kept = store.get(tenant.name, response_id)
            output: list[Item] = [] if kept is None else from_json(kept.response)["output"]
            known.update((item["id"], item) for item in output)
        if reference not in known:
            field = f"input.{place}.id"
            raise ApiError(
                400,
                f"{field} is {reference!r}, which names no item of a stored response; send the item itself.",
                field,
            )
        return known[reference]

    return [
        item_of(item["id"], place) if item["type"] == "item_reference" else item
        for place, item in enumerate(items)
    ]


def _check_ids(before: Iterable[Item], own: Iterable[Item]) -> None:
    """Check that ids are unique, because items are paged by id."""
    known = {item["id"] for item in before}
    for place, item in enumerate(own):
        if item["id"] in known:
            field = f"input.{place}.id"
            raise ApiError(
                400, f"{field} is {item['id']!r}, which an earlier item has; send each item once.", field
            )
        known.add(item["id"])


def _options(body: ResponsesRequest) -> dict[str, Any]:
    """Return all fields of the chat request except the messages."""
    options = {name: getattr(body, name) for name in SAME}
    options["max_completion_tokens"] = body.max_output_tokens
    options["logprobs"] = body.with_logprobs
    if body.tools:
        options["tools"] = [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools]
    options["tool_choice"] = _choice(body.tool_choice)
    if body.reasoning is not None:
        options["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        given = {name: value for name, value in body.text.format.items() if value is not None}
        kind = given.pop("type", None)
        schema = given if given or kind == "json_schema" else None
        options["response_format"] = {"type": kind, "json_schema": schema}
    return options


def _choice(choice: str | ChosenFunction | AllowedFunctions | None) -> str | dict[str, Any] | None:
    match choice:
        case ChosenFunction():
            return _tool(choice.model_dump())
        case AllowedFunctions():
            tools = [_choice(tool) for tool in choice.tools]
            return {"type": choice.type, choice.type: {"mode": choice.mode, "tools": tools}}
    return choice


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    """Return chat's nested form of a function."""
    return {"type": function.pop("type"), "function": function}
