"""Which features do not work together, and why: one table for engine, server, CLI, planner, vLLM and docs.

Callers say which features are on, each with what a message calls it; `refuse` raises for the first row of
the table whose features are all on. scripts/compatibility_page.py writes docs/compatibility.md from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.refusals.features import Feature
from kvreclaim.refusals.table import TABLE

__all__ = ["TABLE", "Feature", "refuse"]


def refuse(on: Mapping[Feature, str]) -> None:
    """Raise InvalidArgumentError for the first row of the table whose features are all on."""
    for row in TABLE:
        if on.keys() >= set(row.features):
            names = {feature.name.lower(): text for feature, text in on.items()}
            raise InvalidArgumentError(row.message.format_map(names), field=row.field)
