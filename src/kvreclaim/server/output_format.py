"""How the model's outputs are split, as the operator says or its chat template shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvreclaim.engine.api.exports import Tokenizer
from kvreclaim.parsers.formats import Splitter, markers, reasoning_parser_of, tool_parser_of
from kvreclaim.server.config import AUTO, NONE, ServerConfig

PROMPT_END = 16
"""Tokens at the end of a prompt in which a template may have opened the reasoning."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """tool_parser, reasoning_parser: names in parsers/formats.py; None: such parts stay text"""

    tokenizer: Tokenizer
    special_tokens: frozenset[str]
    tool_parser: str | None
    reasoning_parser: str | None

    def splitter(
        self,
        prompt_token_ids: list[int],
        tools: Mapping[str, Mapping[str, Any]] | None,
        *,
        one_call: bool,
    ) -> Splitter:
        """For one output. tools: the schemas of the functions that the model was told of; None: of none"""
        prompt_end = ""
        if self.reasoning_parser is not None:
            prompt_end = str(self.tokenizer.decode(prompt_token_ids[-PROMPT_END:], skip_special_tokens=False))
        return Splitter(
            self.tool_parser if tools is not None else None,
            self.reasoning_parser,
            tools=tools,
            prompt_end=prompt_end,
            one_call=one_call,
        )

    def needs_special_tokens(self, *, with_tools: bool) -> bool:
        """Whether the parsers look for special tokens, which texts leave out by default."""
        looked_for = markers(self.tool_parser if with_tools else None, self.reasoning_parser)
        return not self.special_tokens.isdisjoint(looked_for)


def output_format(tokenizer: Tokenizer, config: ServerConfig) -> OutputFormat:
    template = str(config.chat_template or tokenizer.chat_template or "")
    chosen: dict[str, str | None] = {NONE: None}
    tools = {**chosen, AUTO: tool_parser_of(template)}
    reasoning = {**chosen, AUTO: reasoning_parser_of(template)}
    tool_name, reasoning_name = config.tool_call_parser, config.reasoning_parser
    special = frozenset(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return OutputFormat(
        tokenizer, special, tools.get(tool_name, tool_name), reasoning.get(reasoning_name, reasoning_name)
    )
