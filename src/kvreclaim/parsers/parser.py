"""A parser of outputs: code that reads text in order and pauses when it needs more."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from kvreclaim.parsers.pieces import Piece
from kvreclaim.parsers.scanner import Reading, Scanner

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by its name."""


class Parser(ABC):
    """Splits one output into pieces, independent of how the text arrives.

    A possible beginning of a call is held back; if it is none, it becomes text, to the last character. White
    space around calls belongs to neither side, because chat templates add it themselves.
    """

    def __init__(self, tools: Tools | None = None) -> None:
        self.tools: Tools = tools or {}
        self.scanner = Scanner()
        self._reading = self.read()
        self._go_on()

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """The markers that the parser looks for."""

    @property
    def names(self) -> re.Pattern[str]:
        """Names that a function can have."""
        return re.compile("(?s:.+)")

    def own_name(self, written: str) -> str:
        """Return the function's name less the namespace that some formats write in front of it."""
        short = written.removeprefix("functions.")
        return written if written in self.tools and short not in self.tools else short

    @property
    def num_held(self) -> int:
        """Unsettled characters."""
        return len(self.scanner.taken) + len(self.scanner.held)

    @property
    def may_be_call(self) -> bool:
        """Whether the text ends with what may begin a call."""
        return (self.scanner.taken + self.scanner.held).strip() != ""

    @abstractmethod
    def read(self) -> Reading[None]:
        """Read the whole output."""

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that are settled after this text."""
        self.scanner.held += text
        return self._go_on()

    def finish(self) -> list[Piece]:
        """End the text. Returns: what was held back."""
        self.scanner.ended = True
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self.scanner.pieces = self.scanner.pieces, []
        return pieces
