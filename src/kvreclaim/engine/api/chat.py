"""A conversation as token ids, through the model's chat template: users' texts give no control tokens; also
the span of the answer's reasoning."""

from __future__ import annotations

import inspect
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers.utils.chat_template_utils import _compile_jinja_template

from kvreclaim.checks import check_bool, check_text
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.loader import Tokenizer
from kvreclaim.parsers.formats import reasoning_parser_of, think_format
from kvreclaim.parsers.thinking import ThinkFormat, ThinkSpan

RESERVED = frozenset(inspect.signature(Tokenizer.apply_chat_template).parameters) | {"messages"}
"""Names with a meaning of their own in rendering, which template_kwargs may not set."""

MAX_VARIABLE = 64
"""Characters of a variable's name that a refusal quotes."""

SYSTEM_ROLES = ("system", "developer")
PLACEHOLDER = "[cleared]"
"""Replaces a text that is dropped exactly."""

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


class PlainText:
    """Breaks control tokens in users' texts with a mark, before a template adds its own control tokens.

    A copy of the tokenizer has the mark as a token, so it splits the text there. The mark's ids are dropped.
    Nothing else changes, and text without control tokens uses the original tokenizer. A control token of one
    character cannot be broken.
    """

    def __init__(self, tokenizer: Tokenizer, *, allow: bool = False) -> None:
        """allow: tokenize text as control tokens, without marks"""
        self.tokenizer = tokenizer
        self._mark = f"x{secrets.token_hex(12)}x"  # letters and digits: filters of templates leave them alone
        added = sorted(tokenizer.added_tokens_decoder.values(), key=lambda token: -len(token.content))
        control = [_pattern(token) for token in added if token.special and len(token.content) > 1]
        self._control = re.compile("|".join(control)) if control and not allow else None

    def guard(self, value: Any) -> Any:
        """Return the JSON value with marks in its strings, including the names of fields."""
        if self._control is None:
            return value
        if isinstance(value, str):
            return self._control.sub(lambda found: found[0][0] + self._mark + found[0][1:], value)
        if isinstance(value, dict):
            return {self.guard(name): self.guard(each) for name, each in value.items()}
        return [self.guard(each) for each in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a template's text with guarded values."""
        if self._mark not in text:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return self.encode_with_ends(text)[0]

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids, and the end of each token in the text."""
        if self._mark not in text:
            encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return list(encoding["input_ids"]), [end for _, end in encoding["offset_mapping"]]
        backend, mark_id = self._marking
        [found] = backend.encode_batch([text], add_special_tokens=False)  # a batch lets other threads run
        both = [(token, end) for token, (_, end) in zip(found.ids, found.offsets, strict=True)]
        kept = [(token, end) for token, end in both if token != mark_id]
        return [token for token, _ in kept], [end for _, end in kept]

    @cached_property
    def _marking(self) -> tuple[Backend, int]:
        """A copy of the tokenizer that knows the mark, and the mark's id."""
        backend = Backend.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.add_special_tokens([AddedToken(self._mark, special=True, normalized=False)])
        mark_id = backend.token_to_id(self._mark)
        assert mark_id is not None
        return backend, mark_id


def _pattern(token: AddedToken) -> str:
    """Return a pattern for the token. A token that is matched in normalized text may have any case."""
    return f"(?i:{re.escape(token.content)})" if token.normalized else re.escape(token.content)


def prompt_end(tokenizer: Tokenizer, form: ThinkFormat, prompt_token_ids: list[int]) -> str:
    """Return the text after a prompt's last control token that is not a marker of reasoning.

    It is the template's opening of the answer, or a continued message. It has no user's text, because turns
    begin with a control token. Without control tokens it is the whole prompt.
    """
    markers = form.opening, form.closing
    bounds = {
        token_id
        for token_id, added in tokenizer.added_tokens_decoder.items()
        if str(added).strip() and not any(str(added) in marker for marker in markers)
    }
    places = range(len(prompt_token_ids), 0, -1)
    begin = next((place for place in places if prompt_token_ids[place - 1] in bounds), 0)
    return str(tokenizer.decode(prompt_token_ids[begin:], skip_special_tokens=False))


def think_span(
    tokenizer: Tokenizer,
    reasoning_parser: str | None,
    prompt_token_ids: list[int],
    tool_parser: str | None = None,
) -> ThinkSpan | None:
    """Return the span of the answer's reasoning for a parser; None without one.

    tool_parser: of the calls that the answer may have
    """
    form = think_format(reasoning_parser)
    if form is None:
        return None
    return ThinkSpan.behind(form, prompt_end(tokenizer, form, prompt_token_ids), tool_parser)


def span_by_template(tokenizer: Tokenizer | None, prompt_token_ids: list[int]) -> ThinkSpan | None:
    """Return the span of the answer's reasoning for the parser that fits the chat template."""
    if tokenizer is None:
        return None
    return think_span(tokenizer, reasoning_parser_of(str(tokenizer.chat_template or "")), prompt_token_ids)
