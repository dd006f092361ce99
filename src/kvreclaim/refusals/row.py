"""Rows of the table of refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvreclaim.refusals.features import Feature


@dataclass(frozen=True, slots=True)
class Refusal:
    """Features that do not work together. {feature} in a text stands for the caller's name of it.

    field: of the error; None: there is no single one
    why:   the part of the sentence that the rows of its group do not share
    lead:  the sentence up to there
    """

    features: tuple[Feature, ...]
    field: str | None
    why: str
    remedy: str
    lead: str = ""

    @property
    def message(self) -> str:
        """The sentence of the error."""
        return f"{self.lead}{self.why}; {self.remedy}."


Texts = Mapping[Feature | tuple[Feature, ...], str]
"""What is refused beside a group's own features, and "why; remedy"."""


@dataclass(frozen=True, slots=True)
class Group:
    """What rows share: the error's field, the beginning of the sentence, features, the last remedy."""

    field: str | None
    lead: str = ""
    features: tuple[Feature, ...] = ()
    remedy: str = ""

    def rows(self, texts: Texts) -> Iterator[Refusal]:
        """Make the group's rows."""
        for others, text in texts.items():
            features = self.features + (others if isinstance(others, tuple) else (others,))
            why, remedy = (f"{text}; {self.remedy}" if self.remedy else text).split("; ", 1)
            yield Refusal(features, self.field, why, remedy, self.lead)
