"""The number of positions that a model's rotary embeddings are made for, from its config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvreclaim.checks import is_int, require

Rope = Mapping[str, Any]
STRETCHED = frozenset({"linear", "yarn"})
"""Rotations with a factor that max_position_embeddings does not count, as in vLLM; for llama3, longrope and
Gemma 3 it does."""
CHANGING = frozenset({"dynamic", "longrope", "su"})
"""Rotations that change beyond the original length."""
MOST = 1 << 40
ORIGINAL = "original_max_position_embeddings"


def position_limit(config: Mapping[str, Any], known: int) -> int:
    """Return the longest sequence with the rotation that the config describes.

    Args:
        config: of the language model, with rope_parameters or, as in older files, rope_scaling
        known:  max_position_embeddings

    YaRN: factor x original_max_position_embeddings. Linear: factor x max_position_embeddings. Dynamic NTK and
    LongRoPE: the original length. Raises: InvalidArgumentError.
    """
    limit, factor, ends = known, 1.0, []
    for rope in _rotations(config):
        kind = _kind(rope, config)
        original = config.get(ORIGINAL) or rope.get(ORIGINAL, known)
        _check(ORIGINAL, original, is_int(original) and 0 < original <= MOST)
        if kind in CHANGING:
            ends.append(original)
        elif kind in STRETCHED and "gemma3" not in str(config.get("model_type")):
            limit = original if kind == "yarn" else known
            given = rope.get("factor")
            factor = known / limit if given is None else given
            is_number = is_int(factor) or isinstance(factor, float)
            _check("factor", factor, is_number and factor > 0 and limit * factor <= MOST)
    return min(math.floor(limit * factor + 1e-6), *ends, MOST)  # a factor may be a rounded quotient


def _rotations(config: Mapping[str, Any]) -> list[Rope]:
    """Return the rotation of all layers, or that of each type of layers."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    _check("the whole", given, isinstance(given, Mapping), "an object")
    return [each for each in given.values() if isinstance(each, Mapping)] or [given]


def _kind(rope: Rope, config: Mapping[str, Any]) -> object:
    kind = rope.get("rope_type", rope.get("type"))
    _check("rope_type", kind, kind is None or isinstance(kind, str), "text")
    if kind == "yarn" and config.get("model_type") == "phi3":
        return "longrope"  # its name in the first files of the family
    return kind


def _check(field: str, value: object, fits: bool, needed: str = "a number above 0") -> None:
    require(
        fits, f"rope_parameters of the config: {field} is {repr(value)[:60]}; it must be {needed}.", "model"
    )
