"""Syntax of recall settings.

pass               pages are chosen at passes alone
tokens:16          also behind the prompt, at every multiple of 16 tokens
query              also behind the prompt, for every token, by its own queries
query(blocks=8)    options of each, in parentheses: tokens(every=16, blocks=8)
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvreclaim.checks import require
from kvreclaim.compression.spec.grammar import parse_spec
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.budget.recall import MODES, Recall

OPTIONS = tuple(field.name for field in fields(Recall) if field.name != "mode")


def parse_recall(text: object) -> Recall:
    """Parse a recall setting. Raises: InvalidArgumentError."""
    given: dict[str, Any] = {}
    if isinstance(text, str) and text.startswith("tokens:"):
        count, bracket, rest = text.removeprefix("tokens:").partition("(")
        require(count.isdecimal(), f"recall is {text!r}; write tokens:16, or another number.", "recall")
        given["every"], text = int(count), f"tokens{bracket}{rest}"
    spec = parse_spec(text, "recall")
    require(
        spec.name in MODES,
        f"recall is {text!r}; write pass, tokens:N or query, with options as in query(blocks=8).",
        "recall",
    )
    for option, value in spec.args:
        if option not in OPTIONS or option in given or (option == "every" and spec.name == "pass"):
            raise InvalidArgumentError(
                f"recall {text!r} has {option or value!r} out of place; its options are "
                f"{', '.join(OPTIONS)}, each once and by name.",
                field="recall",
            )
        given[option] = value
    if spec.name == "query":
        given.setdefault("every", 1)
    return Recall(spec.name, **given)
