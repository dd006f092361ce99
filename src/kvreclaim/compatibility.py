"""Which features do not work together, and why: one table for engine, server, CLI, planner, vLLM and docs.

Callers say which features are on, each with what a message calls it; `refuse` raises for the first row of
the table whose features are all on. scripts/docs.py writes docs/compatibility.md from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.refusals.batch_invariance import BATCH_INVARIANCE
from kvreclaim.refusals.compression import COMPRESSION, IN_VLLM
from kvreclaim.refusals.engine import ENGINE
from kvreclaim.refusals.features import Feature, Refusal
from kvreclaim.refusals.prompts import PROMPTS

__all__ = ["TABLE", "Feature", "refuse"]

TABLE: tuple[Refusal, ...] = (*ENGINE, *BATCH_INVARIANCE, *COMPRESSION, *PROMPTS, *IN_VLLM)


def refuse(on: Mapping[Feature, str]) -> None:
    """Raise InvalidArgumentError for the first row of the table whose features are all on."""
    for row in TABLE:
        if all(feature in on for feature in row.features):
            said = {feature.name.lower(): text for feature, text in on.items()}
            raise InvalidArgumentError(row.message.format_map(said), field=row.field)
