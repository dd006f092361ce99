"""Find out from the end of a prompt whether its answer begins inside reasoning."""

from __future__ import annotations

from kvreclaim.model.loader import Tokenizer
from kvreclaim.parsers.formats import reasoning_parser_of, think_format
from kvreclaim.parsers.thinking import ThinkFormat, ThinkSpan


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
