"""Incremental text for parsers that read it as if it were complete."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from kvreclaim.parsers.json_object import JsonObject
from kvreclaim.parsers.pieces import Arguments, CallEnd, Piece, Reasoning, Text

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields when it needs more text, and returns its result."""


class Scanner:
    """Unsettled text, and settled pieces.

    held:  text to be read
    ended: no more text comes
    taken: text of the current call, as written
    """

    def __init__(self) -> None:
        self.held = ""
        self.ended = False
        self.taken = ""
        self.pieces: list[Piece] = []

    def take(self, count: int) -> str:
        """Consume characters of a call."""
        text, self.held = self.held[:count], self.held[count:]
        self.taken += text
        return text

    def more(self) -> Reading[bool]:
        """Wait for more text. Returns: whether some has come."""
        size = len(self.held)
        while len(self.held) == size and not self.ended:
            yield
        return len(self.held) > size

    def text_until(
        self, *markers: str, trim: bool = False, kind: type[Text] | type[Reasoning] = Text
    ) -> Reading[str | None]:
        """Emit text up to the next of these markers, which is read as the beginning of a call, with the white
        space before it. Returns: the marker, or None at the end of the output.

        trim: strip white space at the beginning
        """
        while True:
            self.held = self.held.lstrip() if trim else self.held
            place, marker = min(((self.held.find(m), m) for m in markers if m in self.held), default=(-1, ""))
            if marker:
                settled = len(self.held[:place].rstrip())
            else:
                settled = len(self.held) if self.ended else self._num_settled(markers)
            if settled:
                trim = False
                self.pieces.append(kind(self.held[:settled]))
            self.held = self.held[settled:]
            if marker:
                self.taken = ""
                self.take(place - settled + len(marker))
                return marker
            if self.ended:
                return None
            yield from self.more()

    def _num_settled(self, markers: tuple[str, ...]) -> int:
        """Length without a partial marker at the end, and the white space before it."""
        end = len(self.held) - max((overlap(self.held, marker) for marker in markers), default=0)
        return len(self.held[:end].rstrip())

    def release(self) -> None:
        """Emit an apparent call as text."""
        if self.taken:
            self.pieces.append(Text(self.taken))
        self.taken = ""

    def end_call(self, *, complete: bool) -> None:
        """End the current call; it is cut if only text of its own remains."""
        if complete:
            self.pieces.append(CallEnd())
        else:
            self.pieces.append(CallEnd(self.taken, is_cut=self.ended and not self.held))
        self.taken = ""

    def stream_object(self) -> Reading[bool]:
        """Emit the JSON object at the beginning as arguments, as it comes.

        Returns: False if it is invalid, or incomplete at the end; the valid part is emitted.
        """
        found = JsonObject()
        while True:
            count = found.feed(self.held)
            if count:
                self.pieces.append(Arguments(self.take(count)))
            if found.done or found.bad:
                return found.done
            if not (yield from self.more()):
                return False


def overlap(text: str, marker: str) -> int:
    """Characters at the end of the text that may begin the marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
