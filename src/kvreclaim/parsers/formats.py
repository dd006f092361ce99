"""Output formats by name, their detection in chat templates, and a splitter of outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from kvreclaim.parsers import harmony
from kvreclaim.parsers.harmony import Harmony
from kvreclaim.parsers.json_calls import (
    DEEPSEEK,
    HERMES,
    KIMI,
    LLAMA,
    MISTRAL,
    ArrayCalls,
    HermesCalls,
    JsonCalls,
    LlamaCalls,
)
from kvreclaim.parsers.parser import Parser, Tools
from kvreclaim.parsers.pieces import CallEnd, Piece, Text
from kvreclaim.parsers.tag_calls import DSML, GLM, MINIMAX, QWEN3_CODER, TagCalls
from kvreclaim.parsers.thinking import MAGISTRAL, THINK, ThinkFormat, ThinkParser, ThinkSpan

HARMONY, ARRAY = "harmony", "json_array"
TOOL_PARSERS: Mapping[str, Callable[[Tools], Parser]] = MappingProxyType(
    {
        "hermes": HermesCalls,
        "qwen3_coder": partial(TagCalls, QWEN3_CODER),
        "llama3_json": LlamaCalls,
        "mistral": partial(JsonCalls, MISTRAL),
        "deepseek_v3": partial(JsonCalls, DEEPSEEK),
        "deepseek_v32": partial(TagCalls, DSML),
        "glm45": partial(TagCalls, GLM),
        "kimi_k2": partial(JsonCalls, KIMI),
        "minimax_m2": partial(TagCalls, MINIMAX),
        HARMONY: Harmony,
    }
)
"""Most names are vLLM's; deepseek_v3 reads V3.1 and R1, too."""
MARKED = {"hermes": HERMES, "llama3_json": LLAMA}
"""Calls with a marker, of formats whose parser also reads calls without one."""
_PARSERS: Mapping[str, Callable[[Tools], Parser]] = {**TOOL_PARSERS, ARRAY: ArrayCalls}
"""Includes the format of calls for models without their own."""
REASONING_PARSERS: Mapping[str, ThinkFormat | None] = MappingProxyType(
    {"think": THINK, "magistral": MAGISTRAL, HARMONY: None}
)
"""think: Qwen3, DeepSeek R1, GLM and all others with <think>."""
SIGNS: tuple[tuple[str, str], ...] = (
    ("<|channel|>", HARMONY),
    ("<｜DSML｜", "deepseek_v32"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name and its value', "llama3_json"),
)
"""Text of a chat template by which a tool parser is recognised; the first match counts."""


def tool_parser_of(template: str) -> str | None:
    """The tool parser for a chat template, None if its format is unknown."""
    return next((name for sign, name in SIGNS if sign in template), None)


def reasoning_parser_of(template: str) -> str | None:
    """The reasoning parser for a chat template, None if it has no reasoning."""
    if "<|channel|>" in template:
        return HARMONY
    formats = {name: form for name, form in REASONING_PARSERS.items() if form is not None}
    return next((name for name, form in formats.items() if form.opening in template), None)


def think_format(reasoning_parser: str | None) -> ThinkFormat | None:
    """The format of the reasoning for this parser, None without one."""
    if reasoning_parser == HARMONY:
        return harmony.ANALYSIS
    return None if reasoning_parser is None else REASONING_PARSERS[reasoning_parser]


def markers(tool_parser: str | None, reasoning_parser: str | None) -> tuple[str, ...]:
    """Markers of these parsers: with a tokenizer that has them as special tokens, outputs must show those."""
    if HARMONY in (tool_parser, reasoning_parser):
        return harmony.MARKERS
    form = None if reasoning_parser is None else REASONING_PARSERS[reasoning_parser]
    found = () if form is None else (form.opening, form.closing)
    return found if tool_parser is None else (*found, *_PARSERS[tool_parser]({}).markers)


def holds_name(tool_parser: str, name: str) -> bool:
    """Whether a call in this format can have a function of this name."""
    return _PARSERS[tool_parser]({}).names.fullmatch(name) is not None


def calls_in_reasoning(tool_parser: str | None, tools: Tools | None = None) -> Callable[[], Parser] | None:
    """Return a factory of parsers for calls with a marker, which end reasoning; None: such calls do not."""
    if tool_parser is None or tool_parser in (ARRAY, HARMONY):
        return None
    if tool_parser in MARKED:
        return partial(JsonCalls, MARKED[tool_parser], tools)
    return partial(_PARSERS[tool_parser], tools or {})


class Splitter:
    """One output as pieces; without parsers it is all text.

    num_calls: complete ones so far

    tool_parser:      a name in TOOL_PARSERS, or ARRAY
    reasoning_parser: a name in REASONING_PARSERS
    tools:            schemas of the functions in the prompt
    prompt_end:       text of the answer that is part of the prompt; its reasoning may have begun there
    one_call:         anything after the first call is omitted
    """

    def __init__(
        self,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        *,
        tools: Tools | None = None,
        prompt_end: str = "",
        one_call: bool = False,
    ) -> None:
        self.num_calls = 0
        self._one_call = one_call
        self._thinks: ThinkParser | None = None
        self._calls: Parser | None = None
        form, names = think_format(reasoning_parser), (tool_parser, reasoning_parser)
        begun = form is not None and ThinkSpan.behind(form, prompt_end).begun
        if HARMONY in names:
            calls, reasoning = (name == HARMONY for name in names)
            self._calls = Harmony(tools, calls=calls, reasoning=reasoning, begun=begun and reasoning)
        elif tool_parser is not None:
            self._calls = _PARSERS[tool_parser](tools or {})
        if form is not None and reasoning_parser != HARMONY:
            self._thinks = ThinkParser(form, begun=begun, calls=calls_in_reasoning(tool_parser, tools))

    def take(self, text: str, *, last: bool) -> list[Piece]:
        """Pieces that are settled now."""
        pieces: list[Piece] = [Text(text)] if text else []
        pieces = _read(self._thinks, pieces, last=last)
        if self._thinks is None or not self._thinks.left:  # otherwise it has read the calls itself
            pieces = _read(self._calls, pieces, last=last)
        if self._one_call:
            ends = pieces.index(CallEnd()) + 1 if CallEnd() in pieces else len(pieces)
            pieces = [] if self.num_calls else pieces[:ends]
        self.num_calls += pieces.count(CallEnd())
        return pieces


def _read(parser: Parser | None, pieces: list[Piece], *, last: bool) -> list[Piece]:
    """Apply a parser to the texts among these pieces."""
    if parser is None:
        return pieces
    read: list[Piece] = []
    for piece in pieces:
        read += parser.feed(piece.text) if isinstance(piece, Text) else [piece]
    return read + (parser.finish() if last else [])
