"""A conversation as token ids, through the model's chat template."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template

from kvreclaim.checks import check_bool, check_text
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.loader import Tokenizer

RESERVED = frozenset(inspect.signature(Tokenizer.apply_chat_template).parameters) | {"messages"}
"""Names with a meaning of their own in rendering, which template_kwargs may not set."""

MAX_VARIABLE = 64
"""Characters of a variable's name that a refusal quotes."""

SYSTEM_ROLES = ("system", "developer")

Message = Mapping[str, Any]
Change = Callable[[list[Any]], list[Any]]
"""Changes the messages before they are rendered."""


class Speaker(Protocol):
    """A model that chats: its name, for messages, and its tokenizer, with the chat template."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...


def render_chat(speaker: Speaker, messages: Sequence[Message], **options: Any) -> list[int]:
    """The token ids of chat_text, which takes the same options and raises the same errors."""
    text = chat_text(speaker, messages, **options)
    assert speaker.tokenizer is not None, "chat_text refuses a model without tokenizer"
    return list(speaker.tokenizer.encode(text, add_special_tokens=False))


def num_system_tokens(
    speaker: Speaker, token_ids: list[int], messages: Sequence[Message], **options: Any
) -> int:
    """num_leading_tokens of what render_chat makes of these; 0 without system prompt and tools."""
    if not options.get("tools") and messages[0]["role"] not in SYSTEM_ROLES:
        return 0
    assert speaker.tokenizer is not None, "render_chat refuses a model without tokenizer"
    encode = partial(speaker.tokenizer.encode, add_special_tokens=False)
    return num_leading_tokens(
        token_ids, lambda change: chat_text(speaker, change(list(messages)), **options), encode
    )


def num_leading_tokens(
    token_ids: list[int], render: Callable[[Change], str], encode: Callable[[str], list[int]]
) -> int:
    """Count the tokens that the chat template writes before it looks at the conversation: system prompt and
    tools, where it writes them first. render: the prompt's text, with its messages changed"""
    text = render(list)
    return num_shared(token_ids, encode(text[: num_shared(text, render(_begun_otherwise))]))


def num_shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Count the characters, or tokens, that both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _begun_otherwise(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with other text in the first message that is not a system prompt."""
    for at, message in enumerate(messages):
        content = message.get("content")
        if content and message["role"] not in SYSTEM_ROLES:
            other = "b" if str(content).lstrip().startswith("a") else "a"
            given = other if isinstance(content, str) else [{"type": "text", "text": other}]
            return [*messages[:at], {**message, "content": given}, *messages[at + 1 :]]
    return list(messages)


def chat_text(
    speaker: Speaker,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the prompt of the assistant's next turn, as text that includes its special tokens.

    Args:
        messages:               mappings with "role" and the template's other keys; None values are left out
        tools:                  definitions as JSON values, for a template that supports them
        chat_template:          Jinja text instead of the tokenizer's own
        add_generation_prompt:  end with the beginning of the assistant's turn
        continue_final_message: leave the last message open instead, for its continuation
        template_kwargs:        further variables of the template

    Raises: InvalidArgumentError without tokenizer or template, for arguments that the template does not read,
    and with the template's message if it raises.
    """
    _check_messages(messages)
    _check_ending(add_generation_prompt, continue_final_message)
    tokenizer, template = _template(speaker, chat_template, with_tools=bool(tools))
    variables = dict(template_kwargs or {})
    _check_variables(variables, tools, template, tokenizer, speaker.name)
    variables |= {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "tools": [dict(tool) for tool in tools] if tools else None,
    }
    text = _rendered(tokenizer, messages, template, variables)
    check_text("what the chat template made of the messages and tools", text, "messages")
    return text


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Message], template: str, variables: dict[str, Any]
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], chat_template=template, tokenize=False, **variables
        )
    except Exception as error:  # a template is foreign code, and raises whatever comes of it
        raise InvalidArgumentError(
            f"the chat template cannot render these messages ({_reason(error)}); change the messages or pass "
            "another template.",
            field="messages",
        ) from error
    return str(text)


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError(
            f"messages is {'empty' if not messages else 'a ' + type(messages).__name__}; pass a list of at "
            "least one message with a role and content.",
            field="messages",
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgumentError(
                f"message {index} is a {type(message).__name__} without a role; pass mappings with a role "
                "and content.",
                field="messages",
            )
        if message.get("kv_drop") is not None:
            raise InvalidArgumentError(
                f"message {index} has kv_drop, a field of the server's API; leave it out, and pass "
                "drop_spans beside the rendered prompt.",
                field="messages",
            )


def _check_ending(add_generation_prompt: bool, continue_final_message: bool) -> None:
    check_bool("add_generation_prompt", add_generation_prompt)
    check_bool("continue_final_message", continue_final_message)
    if continue_final_message and add_generation_prompt:
        raise InvalidArgumentError(
            "continue_final_message and add_generation_prompt are both true; the last message is either "
            "continued or answered; set one to false.",
            field="continue_final_message",
        )


def _template(speaker: Speaker, given: str | None, *, with_tools: bool) -> tuple[Tokenizer, str]:
    """The tokenizer, and the template's text: the one given, or the tokenizer's (some have one of their own
    for tools)."""
    tokenizer, name = speaker.tokenizer, speaker.name
    if tokenizer is None:
        raise InvalidArgumentError(
            f"{name} has no tokenizer, so no chat template; pass a prompt as token ids."
        )
    if given is not None and (not isinstance(given, str) or not given):
        raise InvalidArgumentError(
            "chat_template is empty or no text; pass the text of a Jinja template.", field="chat_template"
        )
    if given is None and not tokenizer.chat_template:
        raise InvalidArgumentError(
            f"{name} has no chat template; pass one, or a prompt as text or token ids without messages."
        )
    try:
        return tokenizer, str(tokenizer.get_chat_template(given, [{}] if with_tools else None))
    except ValueError as error:
        raise InvalidArgumentError(
            f"{name} has several chat templates ({_reason(error)}); pass the text of one as chat_template."
        ) from error


def _check_variables(
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    template: str,
    tokenizer: Tokenizer,
    name: str,
) -> None:
    """Refuse variables that the template does not read."""
    read = variables_of(template)
    if tools and "tools" not in read:
        raise InvalidArgumentError(
            f"tools are given, but the chat template of {name} has no place for them; leave them out or "
            "pass a template that renders tools.",
            field="tools",
        )
    for variable in variables:
        shown = variable[:MAX_VARIABLE]
        if variable in RESERVED or variable in tokenizer.special_tokens_map:
            raise InvalidArgumentError(
                f"template_kwargs sets {shown!r}, which is reserved; remove it, or pass "
                "it as the argument of this name.",
                field=f"template_kwargs.{shown}",
            )
        if variable not in read:
            raise InvalidArgumentError(
                f"template_kwargs sets {shown!r}, which the chat template of {name} does not read; "
                "remove it.",
                field=f"template_kwargs.{shown}",
            )


@lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Return the variables that a template reads; none if it is not valid."""
    try:
        environment = _compile_jinja_template(template).environment
        read = find_undeclared_variables(environment.parse(template))
    except TemplateError:
        return frozenset()  # rendering raises the error
    return frozenset(read) - environment.globals.keys()


def _reason(error: Exception) -> str:
    """The template author's message, or the error's kind and first line, without text of messages."""
    first = str(error).strip().split("\n", 1)[0].split("Final message to continue", 1)[0].strip().rstrip(".")
    return first if isinstance(error, TemplateError) else f"{type(error).__name__}: {first}"
