"""Fields of a model's config that a caller replaces, as with vLLM's --hf-overrides."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kvreclaim.errors import InvalidArgumentError


def overridden(config: Any, changes: Mapping[str, Any], name: str) -> Any:
    """The config with these fields. Of a field that holds others, such as rope_parameters, those that are not
    named stay.

    Raises: InvalidArgumentError for a field that the config does not have, or values that it does not take.
    """
    if not changes:
        return config
    said = _merged(config.to_dict(), changes, name)
    try:
        return type(config).from_dict(said)
    except Exception as error:  # every family checks its fields in its own way
        reason = str(error).strip().split("\n", 1)[0]
        raise InvalidArgumentError(
            f"the config of {name} does not take hf_overrides ({reason}); see to their values.",
            field="hf_overrides",
        ) from error


def _merged(said: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> dict[str, Any]:
    made = dict(copy.deepcopy(said))
    for key, value in changes.items():
        if key not in made:
            raise InvalidArgumentError(
                f"hf_overrides names {key!r}, which the config of {name} does not have; its fields are "
                f"{', '.join(sorted(made))}.",
                field="hf_overrides",
            )
        own = made[key]
        if key.endswith("_config") and isinstance(own, dict) and isinstance(value, Mapping):
            made[key] = _merged(own, value, f"{name} ({key})")
        else:
            made[key] = {**own, **value} if isinstance(own, dict) and isinstance(value, Mapping) else value
    return made


def yarn(known: int, length: int) -> dict[str, Any]:
    """hf_overrides by which YaRN (arXiv 2309.00071) stretches the positions of a model that knows so many to
    `length` and no further; empty where they suffice. Attention is of the same kind, over more than it was
    trained for."""
    if length <= known:
        return {}
    rotation = {"rope_type": "yarn", "factor": length / known, "original_max_position_embeddings": known}
    return {"rope_parameters": rotation, "max_position_embeddings": length}
