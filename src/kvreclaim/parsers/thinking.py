"""Reasoning in front of an answer, between two tags."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.parsers.parser import Parser
from kvreclaim.parsers.pieces import Reasoning
from kvreclaim.parsers.scanner import Reading


@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """ends: what is written to end the reasoning before its time; empty: the closing marker
    again: more reasoning may follow, anywhere
    """

    opening: str = "<think>"
    closing: str = "</think>"
    ends: str = ""
    again: bool = False

    @property
    def ending(self) -> str:
        return self.ends or self.closing


THINK = ThinkFormat()
MAGISTRAL = ThinkFormat("[THINK]", "[/THINK]")


@dataclass(frozen=True, slots=True)
class ThinkSpan:
    """Where the reasoning of an answer lies.

    begun: the prompt ends with the opening marker, as some templates have it
    """

    form: ThinkFormat
    begun: bool = False

    @classmethod
    def behind(cls, form: ThinkFormat, prompt_end: str) -> ThinkSpan:
        """The span of an answer to a prompt whose text ends so."""
        return cls(form, prompt_end.rstrip().endswith(form.opening))


class ThinkParser(Parser):
    """Reasoning, then text. White space around the tags belongs to neither.

    begun: the prompt ends with the opening tag, as some templates have it
    """

    def __init__(self, form: ThinkFormat = THINK, *, begun: bool = False) -> None:
        self.format, self.begun = form, begun
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
        if self.begun:
            yield from scanner.text_until(self.format.closing, trim=True, kind=Reasoning)
        yield from scanner.text_until(trim=self.begun)
