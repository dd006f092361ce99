"""Parsing of the model's outputs, as configured or derived from its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvreclaim.engine.api.chat import prompt_end, think_span, variables_of
from kvreclaim.engine.api.exports import Tokenizer
from kvreclaim.parsers.formats import (
    ARRAY,
    HARMONY,
    Splitter,
    markers,
    reasoning_parser_of,
    think_format,
    tool_parser_of,
)
from kvreclaim.parsers.thinking import ThinkSpan
from kvreclaim.server.base.config import AUTO, NONE, ServerConfig

WRITTEN = "hermes"
"""Parser of calls if the server writes the tools into the prompt."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """template: for chats with tools
    writes_tools: the template does not support tools; server/shared/tool_prompt.py writes them
    tool_parser, reasoning_parser: names in parsers/formats.py; None: such parts stay text
    unwritten: ids of the tokens, by name, that free text of a grammar excludes
    """

    tokenizer: Tokenizer
    special_tokens: frozenset[str]
    unwritten: Mapping[str, int]
    template: str
    tool_parser: str | None
    reasoning_parser: str | None
    writes_tools: bool = False

    @property
    def is_harmony(self) -> bool:
        return HARMONY in (self.tool_parser, self.reasoning_parser)

    def forcing(self) -> OutputFormat:
        """Return the format of forced calls: a JSON array if the model has no format of its own."""
        forced = HARMONY if self.is_harmony else ARRAY
        return self if self.tool_parser is not None else replace(self, tool_parser=forced)

    def splitter(
        self,
        prompt_token_ids: list[int],
        tools: Mapping[str, Mapping[str, Any]] | None,
        *,
        one_call: bool,
    ) -> Splitter:
        """Make the splitter of one output. tools: schemas of the prompt's functions; None: none"""
        form = think_format(self.reasoning_parser)
        return Splitter(
            self.tool_parser if tools is not None else None,
            self.reasoning_parser,
            tools=tools,
            prompt_end="" if form is None else prompt_end(self.tokenizer, form, prompt_token_ids),
            one_call=one_call,
        )

    def thinking(self, prompt_token_ids: list[int], *, with_tools: bool) -> ThinkSpan | None:
        """Span of the answer's reasoning; None: no reasoning parser."""
        tool_parser = self.tool_parser if with_tools else None
        return think_span(self.tokenizer, self.reasoning_parser, prompt_token_ids, tool_parser)

    def takes_apart(self, *, with_tools: bool) -> bool:
        """Whether an answer is split into parts, which the template may render differently later."""
        return self.reasoning_parser is not None or (with_tools and self.tool_parser is not None)

    def needs_special_tokens(self, *, with_tools: bool) -> bool:
        """Whether the parsers need special tokens, which texts omit by default."""
        looked_for = markers(self.tool_parser if with_tools else None, self.reasoning_parser)
        return not self.special_tokens.isdisjoint(looked_for)


def output_format(tokenizer: Tokenizer, config: ServerConfig) -> OutputFormat:
    template = _template(tokenizer, config)
    chosen: dict[str, str | None] = {NONE: None}
    tools = {**chosen, AUTO: tool_parser_of(template)}
    reasoning = {**chosen, AUTO: reasoning_parser_of(template)}
    tool_name, reasoning_name = config.tool_call_parser, config.reasoning_parser
    writes = tool_name in (AUTO, WRITTEN) and bool(template) and "tools" not in variables_of(template)
    added = {str(token): (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    return OutputFormat(
        tokenizer,
        frozenset(name for name, (_, special) in added.items() if special),
        {name: number for name, (number, special) in added.items() if special or _is_tag(name)},
        template,
        WRITTEN if writes else tools.get(tool_name, tool_name),
        reasoning.get(reasoning_name, reasoning_name),
        writes,
    )


def _is_tag(token: str) -> bool:
    """Whether llguidance treats an added token as special, whatever the tokenizer says."""
    return token.startswith("<") and token.endswith(">")


def _template(tokenizer: Tokenizer, config: ServerConfig) -> str:
    """Return the chat template for chats with tools, which a tokenizer may have separately. Empty: none."""
    if config.chat_template or not isinstance(tokenizer.chat_template, dict):
        return str(config.chat_template or tokenizer.chat_template or "")
    named = tokenizer.chat_template
    return str(named.get("tool_use") or named.get("default") or "")
