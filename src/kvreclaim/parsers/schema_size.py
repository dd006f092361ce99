"""How large a JSON schema may be: making its grammar takes time that grows with the square of an object."""

from __future__ import annotations

from typing import Any

MAX_PROPERTIES = 400
"""Properties of one object; llguidance gives up at some 500 that may be left out."""


def too_many(schema: Any) -> int | None:
    """The properties of an object of the schema that has too many; None: there is none."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            named = value.get("properties")
            if isinstance(named, dict) and len(named) > MAX_PROPERTIES:
                return len(named)
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return None
