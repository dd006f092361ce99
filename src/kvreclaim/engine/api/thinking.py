"""Where a prompt's answer has its reasoning."""

from __future__ import annotations

from kvreclaim.model.loader import Tokenizer
from kvreclaim.parsers.formats import reasoning_parser_of, think_format
from kvreclaim.parsers.thinking import ThinkSpan

PROMPT_END = 16
"""Tokens at the end of a prompt in which a template may have opened the reasoning."""


def prompt_end(tokenizer: Tokenizer, prompt_token_ids: list[int]) -> str:
    """The text of a prompt's last tokens."""
    return str(tokenizer.decode(prompt_token_ids[-PROMPT_END:], skip_special_tokens=False))


def think_span(
    tokenizer: Tokenizer, reasoning_parser: str | None, prompt_token_ids: list[int]
) -> ThinkSpan | None:
    """The span of the answer's reasoning as a parser finds it; None without one."""
    form = think_format(reasoning_parser)
    return None if form is None else ThinkSpan.behind(form, prompt_end(tokenizer, prompt_token_ids))


def span_by_template(tokenizer: Tokenizer | None, prompt_token_ids: list[int]) -> ThinkSpan | None:
    """The same, as the tokenizer's chat template shows it."""
    if tokenizer is None:
        return None
    return think_span(tokenizer, reasoning_parser_of(str(tokenizer.chat_template or "")), prompt_token_ids)
