"""A conversation as /v1/chat/completions and /tokenize take it, converted for chat templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from kvreclaim.engine.api.chat import PLACEHOLDER, SYSTEM_ROLES, Change, num_leading_tokens
from kvreclaim.engine.features.drops.feature import DroppedSpans
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.parsers.json_value import json_object
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import MAX_TOOLS, Fields, Listed, described
from kvreclaim.server.shared.bodies import num_chars
from kvreclaim.server.shared.calls import check_unique
from kvreclaim.server.shared.drops import DropMarks, KVDrop, check_place
from kvreclaim.server.shared.service import Service, text_of
from kvreclaim.server.shared.tool_prompt import broken_call


class TextPart(Fields):
    type: Literal["text"]
    text: str


Content = Annotated[
    str | Listed[TextPart],
    described("text or a list of text parts; images, audio and files are not supported"),
]


class FunctionCall(Fields):
    """arguments: JSON text; empty: none. The model reads invalid JSON as text."""

    name: str
    arguments: str


class ToolCallMessage(Fields):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class RequestMessage(Fields):
    """A message of any role. Further fields of an answer's message may be sent back if they are null.

    reasoning_content, reasoning: of the assistant, for templates that show it
    kv_drop: the text leaves the cache, or is replaced by a placeholder
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[Listed[ToolCallMessage], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    kv_drop: KVDrop = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: None = None


class FunctionDefinition(Fields):
    """strict: arguments follow the schema; not part of the prompt"""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Fields):
    type: Literal["function"]
    function: FunctionDefinition


NAMED = {
    "tools": "tools",
    "template_kwargs": "chat_template_kwargs",
    "continue_final_message": "continue_final_message",
}
"""Request fields by the argument that a template refuses; all other errors concern the messages."""

Messages = Annotated[Listed[RequestMessage], Field(min_length=1)]
Tools = Annotated[Listed[FunctionTool], Field(min_length=1, max_length=MAX_TOOLS)]


class ConversationOptions(Fields):
    """Options of the chat template."""

    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


def render(
    messages: Sequence[RequestMessage],
    options: ConversationOptions,
    service: Service,
    *,
    with_tools: bool = True,
) -> list[int]:
    """Return the prompt's token ids. Raises: ApiError naming the field."""
    text = rendered(messages, options, service, with_tools=with_tools)
    assert service.plain is not None, "a model without tokenizer is refused"
    return service.plain.encode(text)


def system_counter(
    token_ids: list[int],
    messages: Sequence[RequestMessage],
    options: ConversationOptions,
    service: Service,
    *,
    with_tools: bool = True,
) -> Callable[[], int] | None:
    """Return a counter of the leading tokens of system prompt and tools; None: there are none."""
    has_system = service.config.system or messages[0].role in SYSTEM_ROLES
    if not (with_tools and options.tools) and not has_system:
        return None
    assert service.plain is not None, "a model without tokenizer is refused"

    def render(change: Change) -> str:
        return rendered(messages, options, service, with_tools=with_tools, change=change)

    return partial(num_leading_tokens, token_ids, render, service.plain.encode)


def rendered(
    messages: Sequence[RequestMessage],
    options: ConversationOptions,
    service: Service,
    *,
    with_tools: bool = True,
    change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list,
) -> str:
    """Render the prompt as text, for `plain` to encode. change: applied to the template's messages.

    Raises: ApiError naming the field.
    """
    service.check_messages(len(messages), sum(map(_num_chars, messages)))
    tools = [_definition(tool) for tool in options.tools or ()] if with_tools else []
    service.check_chars(num_chars(tools), "tools")
    check_unique([tool.function.name for tool in options.tools or ()])
    _check_calls(messages)
    _check_drops(messages)
    developer = "developer" if _template_knows(service, "developer") else "system"
    made = change([_for_template(message, developer) for message in messages])
    continues = bool(options.continue_final_message)
    answers = not continues if options.add_generation_prompt is None else options.add_generation_prompt

    variables = _variables(options, service)

    def written(conversation: list[dict[str, Any]]) -> str:
        try:
            return text_of(
                service,
                conversation,
                tools=tools or None,
                add_generation_prompt=answers,
                continue_final_message=continues,
                template_kwargs=variables,
            )
        except InvalidArgumentError as error:
            name = (error.field or "").partition(".")[0]
            raise ApiError(400, str(error), name or None).about(NAMED.get(name, "messages")) from error

    text = written(made)
    # Of a tool message the name repeats the call's.
    for role in sorted({message["role"] for message in made if "name" in message} - {"tool"}):
        if text == written([_nameless(message) if message["role"] == role else message for message in made]):
            place = next(i for i, message in enumerate(made) if message["role"] == role and "name" in message)
            field = f"messages.{place}.name"
            raise ApiError(400, f"{field} changes nothing in this model's chat template; remove it.", field)
    return text


def _variables(options: ConversationOptions, service: Service) -> dict[str, Any] | None:
    """Return the template's variables, with reasoning_effort mapped to the template's own."""
    effort, given = options.reasoning_effort, options.chat_template_kwargs
    if effort is None:
        return given
    values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    name = next(filter(service.template_reads, values), None)
    if name is None:
        raise ApiError(
            400,
            "reasoning_effort is set, but this model's chat template has no switch for it (reasoning_effort "
            "or enable_thinking); remove it.",
            "reasoning_effort",
        )
    if name in (given or {}):
        raise ApiError(
            400,
            f"reasoning_effort and chat_template_kwargs.{name} are both set; leave one out.",
            "reasoning_effort",
        )
    return {**(given or {}), name: values[name]}


def _for_template(message: RequestMessage, developer: str) -> dict[str, Any]:
    """Join text parts (templates of text models take nothing else) and parse arguments."""
    content = PLACEHOLDER if message.kv_drop == "exact" else _text_of(message)
    role = developer if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        made["name"] = message.name
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought is not None:
        made["reasoning_content"] = thought
    called = [(call, json_object(call.function.arguments)) for call in message.tool_calls or ()]
    broken = [
        broken_call(call.function.name, call.function.arguments) for call, given in called if given is None
    ]
    made["content"] = "\n".join(filter(None, [content, *broken]))
    if calls := [_call(call, given) for call, given in called if given is not None]:
        made["tool_calls"] = calls
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made


def _text_of(message: RequestMessage) -> str:
    content = message.content
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def _definition(tool: FunctionTool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})


def _num_chars(message: RequestMessage) -> int:
    """Count the characters of everything that a template may write."""
    content = message.content or ""
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    texts += [message.reasoning_content or message.reasoning or "", message.name or ""]
    for call in message.tool_calls or ():
        texts += [call.function.name, call.function.arguments]
    return sum(map(len, texts))


def _call(call: ToolCallMessage, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def with_drops(
    messages: Sequence[RequestMessage], write: Callable[[Change], str], service: Service
) -> tuple[list[int], DroppedSpans | None]:
    """Return the prompt's tokens, and those that leave the cache. write: renders changed messages. Raises:
    ApiError."""
    text = write(list)
    lossy = [place for place, message in enumerate(messages) if message.kv_drop == "lossy"]
    if not lossy:
        assert service.plain is not None, "a model without tokenizer is refused"
        return service.plain.encode(text), None
    marks, last = DropMarks(), len(messages) - 1
    answers = [place for place in range(last) if messages[place].role == "assistant"]
    new = answers[-1] + 1 if answers else last

    def marked(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = [dict(message) for message in made]
        found[new]["content"] = marks.before(found[new]["content"])
        for place in lossy:
            found[place]["content"] = marks.around(found[place]["content"], f"messages.{place}.kv_drop")
        return found

    return marks.read(text, write(marked), service)


def _check_drops(messages: Sequence[RequestMessage]) -> None:
    for place, message in enumerate(messages):
        if message.kv_drop is not None:
            check_place(
                message.kv_drop,
                _text_of(message),
                f"messages.{place}.kv_drop",
                is_system=message.role in SYSTEM_ROLES,
                is_last=place == len(messages) - 1,
            )


def _check_calls(messages: Sequence[RequestMessage]) -> None:
    """Check that calls belong to the assistant, and each result to a call."""
    known: set[str] = set()
    for place, message in enumerate(messages):
        where = f"messages.{place}"
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            raise ApiError(400, f"{where}.content is missing; pass text.", f"{where}.content")
        if message.reasoning not in (None, message.reasoning_content or message.reasoning):
            field = f"{where}.reasoning"
            raise ApiError(400, f"{field} and reasoning_content differ; pass one of them.", field)
        if message.tool_calls and message.role != "assistant":
            field = f"{where}.tool_calls"
            raise ApiError(400, f"{field} belongs to the assistant, not to {message.role}; remove it.", field)
        known |= {call.id for call in message.tool_calls or ()}
        if (message.role == "tool") != (message.tool_call_id is not None):
            verb = "is missing" if message.role == "tool" else "belongs to tool messages; remove it"
            raise ApiError(400, f"{where}.tool_call_id {verb}.", f"{where}.tool_call_id")
        if message.tool_call_id is not None and message.tool_call_id not in known:
            field = f"{where}.tool_call_id"
            raise ApiError(400, f"{field} is the id of no call before it; pass the call's id.", field)


def _nameless(message: dict[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in message.items() if field != "name"}


def _template_knows(service: Service, word: str) -> bool:
    template = service.config.chat_template or service.tokenizer.chat_template
    return re.search(rf"\b{word}\b", str(template)) is not None
