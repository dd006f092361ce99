"""Size limit of JSON schemas: making a grammar takes time quadratic in an object's properties."""

from __future__ import annotations

from typing import Any

MAX_PROPERTIES = 400
"""Most properties of one object; llguidance gives up at some 500 optional ones."""


def too_many(schema: Any) -> int | None:
    """Return the number of properties of an object that exceeds the limit; None: none does."""
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
