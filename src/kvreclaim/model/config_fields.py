"""The fields of a model's config that identify what the model computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NAMES = frozenset({"_name_or_path", "_commit_hash", "_model_name_or_path", "transformers_version"})
"""Fields without an effect on the model: where its files are, and which transformers wrote them."""

OF_REQUESTS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id", "use_cache"})
"""Fields that only decide where a text begins and ends, or who keeps the cache."""
ROUNDING = frozenset({"dtype"})
"""Fields that change the rounding of a number, which averages over many tokens do not see."""
PLAIN_ROPES = frozenset({"default", "linear"})
"""Rotations that do not depend on max_position_embeddings, which then is a limit and no more."""


def config_fields(config: Any) -> dict[str, Any]:
    """Return every field of a transformers config except NAMES, as JSON has them, sorted by name.

    Blocks, states and sessions are used only where all these fields are equal. A field that has no effect on
    some family stays in: a recomputed prefix costs time, a wrong one gives wrong answers.
    """
    fields = json.loads(json.dumps(config.to_dict(), default=str), parse_constant=str)
    return _without(fields, NAMES)


def measured_fields(config: Any) -> dict[str, Any]:
    """Return the fields that query statistics depend on: all but those of requests and rounding."""
    left_out = OF_REQUESTS | ROUNDING
    if _ropes(config) <= PLAIN_ROPES:
        left_out |= {"max_position_embeddings"}
    return _without(config_fields(config), left_out)


def _without(fields: Mapping[str, Any], left_out: frozenset[str]) -> dict[str, Any]:
    """Return the fields, and those of configs within, that are not left out."""
    return {
        name: _without(value, left_out) if isinstance(value, dict) else value
        for name, value in sorted(fields.items())
        if name not in left_out
    }


def _ropes(config: Any) -> set[str]:
    """Types of all rotations of a config: rope_parameters is one, or one for each type of layers."""
    given = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [value for value in given.values() if isinstance(value, dict)] or [given]
    return {str(parameters.get("rope_type", "default")) for parameters in each}
