"""Reasoning before an answer, between two tags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvreclaim.parsers.parser import Parser
from kvreclaim.parsers.pieces import CallBegin, Piece, Reasoning, Text
from kvreclaim.parsers.scanner import Reading, overlap


@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """ends:   text that ends the reasoning early; empty: the closing marker
    again:  more reasoning may follow, anywhere
    others: later markers, which end reasoning without the closing one
    answer: the marker before an answer that follows reasoning; empty: none
    """

    opening: str = "<think>"
    closing: str = "</think>"
    ends: str = ""
    again: bool = False
    others: tuple[str, ...] = ()
    answer: str = ""

    @property
    def ending(self) -> str:
        return self.ends or self.closing


THINK = ThinkFormat()
MAGISTRAL = ThinkFormat("[THINK]", "[/THINK]")


@dataclass(frozen=True, slots=True)
class ThinkSpan:
    """The span of an answer's reasoning.

    begun: it began in the prompt: by the template, or in a continued message
    over:  it ends with the prompt
    calls: the tool parser of the calls that end it; None: calls do not
    """

    form: ThinkFormat
    begun: bool = False
    over: bool = False
    calls: str | None = None

    @classmethod
    def behind(cls, form: ThinkFormat, prompt_end: str, calls: str | None = None) -> ThinkSpan:
        """Return the span of an answer after this text of the prompt; its last marker decides."""
        _, opening, thought = prompt_end.rpartition(form.opening)
        begun = opening != "" and not any(marker in thought for marker in (form.closing, *form.others))
        return cls(form, begun, prompt_end.rstrip().endswith(form.closing), calls)


class ThinkParser(Parser):
    """Reasoning, then text. White space around the tags belongs to neither.

    begun: the prompt contains the opening tag
    calls: makes a parser of calls, which end the reasoning
    left:  parser of a call that began in the reasoning; it has read everything since
    """

    def __init__(
        self, form: ThinkFormat = THINK, *, begun: bool = False, calls: Callable[[], Parser] | None = None
    ) -> None:
        self.format, self.begun, self._calls = form, begun, calls
        self.left = False
        super().__init__()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.format.opening, self.format.closing

    def read(self) -> Reading[None]:
        scanner, opening = self.scanner, self.format.opening
        while (begins := scanner.held.strip()) != opening and opening.startswith(begins):
            if not (yield from scanner.more()):
                break
        if scanner.held.lstrip().startswith(opening):
            scanner.held = scanner.held.lstrip()[len(opening) :]
            self.begun = True
        if self.begun and self._calls is None:
            yield from scanner.text_until(self.format.closing, trim=True, kind=Reasoning)
        elif self.begun and self._calls is not None:
            calls = yield from self._until_call(self._calls)
            if calls is not None:
                yield from self._answer(calls)
                return
        yield from scanner.text_until(trim=self.begun)

    def _until_call(self, make: Callable[[], Parser]) -> Reading[Parser | None]:
        """Read reasoning. Returns: the parser of a call that began in it; None: none did."""
        scanner, calls, closing = self.scanner, make(), self.format.closing
        trim = True
        while True:
            held = scanner.held = scanner.held.lstrip() if trim else scanner.held
            place = held.find(closing)
            ends = place >= 0 or scanner.ended
            size = place if place >= 0 else len(held) - (0 if scanner.ended else overlap(held, closing))
            if place >= 0 or not scanner.ended:
                size = len(held[:size].rstrip())
            trim = trim and not size
            scanner.held = held[size:]
            pieces = calls.feed(held[:size])
            begun = any(isinstance(piece, CallBegin) for piece in pieces)
            if ends and not begun:
                pieces += calls.finish()
            self.left = self._add(pieces)
            if self.left:
                return calls if begun else make()
            if ends:
                scanner.held = scanner.held.lstrip()[len(closing) :]
                return None
            yield from scanner.more()

    def _add(self, pieces: list[Piece]) -> bool:
        """Add pieces of reasoning and the rest. Returns: whether a call has begun."""
        begun = False
        for piece in pieces:
            begun |= isinstance(piece, CallBegin)
            if isinstance(piece, Text) and not begun:
                piece = Reasoning(piece.text)
            self.scanner.pieces.append(piece)
        return begun

    def _answer(self, calls: Parser) -> Reading[None]:
        """Read calls and text; a late closing tag is omitted."""
        scanner, late = self.scanner, ThinkParser(self.format, begun=True)
        while True:
            pieces, scanner.held = calls.feed(scanner.held), ""
            pieces += calls.finish() if scanner.ended else []
            for piece in pieces:
                if isinstance(piece, Text):
                    scanner.pieces += _as_text(late.feed(piece.text))
                else:
                    if late.num_held:
                        scanner.pieces += _as_text(late.finish())
                        late = ThinkParser(self.format, begun=True)
                    scanner.pieces.append(piece)
            if scanner.ended:
                scanner.pieces += _as_text(late.finish())
                return
            yield from scanner.more()


def _as_text(pieces: list[Piece]) -> list[Piece]:
    return [Text(piece.text) if isinstance(piece, Reasoning) else piece for piece in pieces]
