"""Tool calls in a model's text, found while it streams."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to be called; arguments: the JSON text of an object."""

    name: str
    arguments: str


Piece = str | ToolCall


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write them.

    Splits one output into text and tool calls, in their order. What may turn out to be part of a call is held
    back; what looked like a call and is none is text, to the last character.

    A call is passed on when it is complete, so that its arguments are always valid JSON. Whitespace around a
    call belongs to neither side: the chat templates of these models put it there themselves. A last call
    may lack its closing tag.
    """

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._searched = 0
        self._after_call = False

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are settled after this text; none is empty."""
        self._held += text
        pieces: list[Piece] = []
        while (start := self._held.find(self.OPEN)) >= 0:
            if not self._take_call(start + len(self.OPEN), pieces):
                return pieces
        self._release(len(self._held) - self._num_unsettled(), pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """No text follows: what was held back."""
        pieces: list[Piece] = []
        start = self._held.find(self.OPEN)
        call = _parse(self._held[start + len(self.OPEN) :]) if start >= 0 else None
        if call is not None:
            pieces.append(call)
        elif not (self._after_call and self._held.isspace()):
            self._release(len(self._held), pieces)
        self._held = ""
        return pieces

    def _take_call(self, begin: int, pieces: list[Piece]) -> bool:
        """Settle what follows an opening tag that ends at `begin`. Returns: False if more must come first."""
        self._release(len(self._held[: begin - len(self.OPEN)].rstrip()), pieces)
        begin = self._held.index(self.OPEN) + len(self.OPEN)
        end = self._held.find(self.CLOSE, max(begin, self._searched))
        while end >= 0 and _within_string(self._held[begin:end]):
            end = self._held.find(self.CLOSE, end + 1)
        if end < 0:
            self._searched = max(0, len(self._held) - len(self.CLOSE) + 1)
            return False
        call = _parse(self._held[begin:end])
        if call is None:
            self._release(begin, pieces)
        else:
            self._held, self._searched = self._held[end + len(self.CLOSE) :], 0
            self._after_call = True
            pieces.append(call)
        return True

    def _release(self, count: int, pieces: list[Piece]) -> None:
        """Pass on the first characters of what is held, less whitespace right behind a call."""
        text, self._held = self._held[:count], self._held[count:]
        self._searched = 0 if count else self._searched
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            pieces.append(text)

    def _num_unsettled(self) -> int:
        """Characters at the end that may belong to a call: the beginning of a tag, whitespace before it."""
        tag = next((n for n in range(len(self.OPEN) - 1, 0, -1) if self._held.endswith(self.OPEN[:n])), 0)
        return len(self._held) - len(self._held[: len(self._held) - tag].rstrip())


def _within_string(text: str) -> bool:
    """Whether this beginning of a JSON text ends inside a string."""
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1


def _parse(body: str) -> ToolCall | None:
    """The call that this JSON describes, None if it describes none."""
    try:
        value = json.loads(body)
        name, arguments = value["name"], value.get("arguments", {})
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (str(name) + text).encode()  # a lone surrogate can be written as JSON, but not sent
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, text)


PARSERS: Mapping[str, type[HermesParser]] = MappingProxyType({"hermes": HermesParser})


class Splitter:
    """One output as pieces of text and tool calls; without a parser it is all text.

    parser: a name in PARSERS
    """

    def __init__(self, parser: str | None) -> None:
        self._parser = None if parser is None else PARSERS[parser]()
        self.num_calls = 0

    def take(self, text: str, *, last: bool) -> list[Piece]:
        """Pieces that are settled now."""
        if self._parser is None:
            return [text] if text else []
        pieces = self._parser.feed(text) if text else []
        pieces += self._parser.finish() if last else []
        self.num_calls += sum(isinstance(piece, ToolCall) for piece in pieces)
        return pieces
