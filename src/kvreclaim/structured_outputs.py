"""Constraints on an output: vLLM's StructuredOutputsParams."""

from __future__ import annotations

import json as json_text
from dataclasses import dataclass, fields
from typing import Any

from kvreclaim.checks import require
from kvreclaim.parsers.schema_size import MAX_PROPERTIES, too_many

MAX_GRAMMAR = 1 << 20
"""Characters of a schema, an expression or a grammar."""
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Exactly one of these. Raises: InvalidArgumentError.

    json:        a JSON schema, as text or as an object
    regex:       a regular expression that the whole output matches
    choice:      texts, one of which is the output
    grammar:     a grammar in Lark's or GBNF's notation, which begins at `start` or `root`
    json_object: any JSON object
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        require(
            len(given) == 1,
            f"structured_outputs has {' and '.join(given) or 'nothing'}; pass exactly one of "
            f"{', '.join(field.name for field in fields(self))}.",
            "structured_outputs",
        )
        if self.choice is not None:
            require(
                isinstance(self.choice, (list, tuple))
                and bool(self.choice)
                and all(isinstance(text, str) and text for text in self.choice),
                f"structured_outputs.choice is {str(self.choice)[:80]!r}; pass a list of non-empty strings.",
                "structured_outputs",
            )
            require(
                len(self.choice) <= MAX_CHOICES,
                f"structured_outputs.choice has {len(self.choice)} texts, at most {MAX_CHOICES} are allowed; "
                "leave some out.",
                "structured_outputs",
            )
        count = too_many(_value(self.json))
        require(
            count is None,
            f"structured_outputs.json has an object of {count} properties, at most {MAX_PROPERTIES} are "
            "allowed; leave some out.",
            "structured_outputs",
        )
        kind, text = self.source
        require(
            len(text) <= MAX_GRAMMAR,
            f"structured_outputs.{kind} has {len(text)} characters, at most {MAX_GRAMMAR} are allowed; "
            "shorten it.",
            "structured_outputs",
        )

    @property
    def source(self) -> tuple[str, str]:
        """The field that is given, and its text: equal texts mean the same outputs."""
        if self.json_object:
            return "json", '{"type": "object"}'
        if self.json is not None:
            return "json", self.json if isinstance(self.json, str) else json_text.dumps(self.json)
        if self.choice is not None:
            return "choice", json_text.dumps(list(self.choice))
        return ("regex", self.regex) if self.regex is not None else ("grammar", str(self.grammar))


def _value(schema: str | dict[str, Any] | None) -> Any:
    """Return the schema as a value; None if it is no JSON, which the grammar's compiler reports."""
    if not isinstance(schema, str):
        return schema
    try:
        return json_text.loads(schema)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class AnswerGrammar(StructuredOutputsParams):
    """The grammar of an answer that has more than one part, such as reasoning or calls, in llguidance's own
    JSON."""

    @property
    def source(self) -> tuple[str, str]:
        return "answer", str(self.grammar)
