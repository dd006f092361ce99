"""The output of a plan: figures for programs, sections with arithmetic for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Section:
    """rows: label and text; steps: lines of the arithmetic."""

    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def row(self, label: str, text: str) -> None:
        self.rows.append((label, text))

    def step(self, text: str) -> None:
        self.steps.append(text)


@dataclass(slots=True)
class PlanReport:
    """values: all figures by name; sections: printed text."""

    values: dict[str, Any] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)

    def section(self, title: str) -> Section:
        self.sections.append(Section(title))
        return self.sections[-1]

    def set(self, **values: Any) -> None:
        """Raises: AssertionError for a name that has a value already."""
        again = self.values.keys() & values.keys()
        assert not again, f"{again} are set twice"
        self.values.update(values)


def lines(answer: PlanReport, *, explain: bool = False) -> list[str]:
    """The sections as text, with the arithmetic under each where it is wanted."""
    out: list[str] = []
    width = max(len(label) for section in answer.sections for label, _ in section.rows)
    for section in answer.sections:
        out += ["", section.title] if out else [section.title]
        out += [f"  {label:<{width}}  {text}" for label, text in section.rows]
        out += [f"    {text}" for text in section.steps if explain]
    return out
