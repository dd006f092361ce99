"""Which features do not work together, and why: one table for engine, server, CLI, planner, vLLM and docs.

Callers pass each feature with its name in a message; `refuse` raises for the first row of the table with
all features on. `python scripts/docs.py compatibility` writes docs/compatibility.md from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.refusals.features import Feature
from kvreclaim.refusals.table import TABLE

__all__ = ["TABLE", "Feature", "refuse"]


def refuse(features: Mapping[Feature, object]) -> None:
    """Raise InvalidArgumentError for the first row of the table with all features on. None and False:
    the feature is off; other values stand in the message."""
    on = {each: value for each, value in features.items() if value is not None and value is not False}
    if len(on) < 2:
        return
    for row in TABLE:
        if on.keys() >= set(row.features):
            names = {feature.name.lower(): value for feature, value in on.items()}
            raise InvalidArgumentError(row.message.format_map(names), field=row.field)
