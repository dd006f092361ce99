"""Fields of a model's config that a caller replaces, as with vLLM's --hf-overrides."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kvreclaim.errors import InvalidArgumentError

ROTATION = ("rope_parameters", "rope_scaling", "rope_theta")
"""rope_parameters, and as older configs spell its parts."""
UNSCALED = ("rope_theta", "partial_rotary_factor")


def overridden(config: Any, changes: Mapping[str, Any], name: str) -> Any:
    """Return the config with these fields. Of a field that holds others, such as rope_parameters, those that
    are not named stay.

    Raises: InvalidArgumentError for a field that the config does not have, or values that it does not take.
    """
    if not changes:
        return config
    fields = _merged(config.to_dict(), changes, name)
    try:
        return type(config).from_dict(fields)
    except Exception as error:  # every family checks its fields in its own way
        reason = str(error).strip().split("\n", 1)[0]
        raise InvalidArgumentError(
            f"the config of {name} does not take hf_overrides ({reason}); see to their values.",
            field="hf_overrides",
        ) from error


def _merged(fields: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> dict[str, Any]:
    made = dict(copy.deepcopy(fields))
    rotation = made.get("rope_parameters")
    for key, value in changes.items():
        if isinstance(rotation, dict) and key in ROTATION:
            made["rope_parameters"] = rotation = _turned(rotation, key, value, name)
            continue
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


def _turned(own: dict[str, Any], key: str, value: Any, name: str) -> dict[str, Any]:
    """rope_parameters with a change that one of ROTATION names. Where types of layers have rotations of their
    own, what names no type is about full_attention.

    Raises: InvalidArgumentError.
    """
    if key == "rope_theta":
        value = {key: value}
    if not isinstance(value, Mapping | None):
        raise InvalidArgumentError(
            f"hf_overrides has {key} = {value!r}; it must be an object, or null for no scaling.",
            field="hf_overrides",
        )
    types = [each for each in own if isinstance(own[each], dict)]
    if not types:
        return _rotation(own, value)
    changes = dict(value) if value and set(value) <= set(types) else {"full_attention": value}
    if not changes.keys() <= set(types):
        raise InvalidArgumentError(
            f"hf_overrides has one {key}, and {name} has rotations of {', '.join(types)}; name one of these "
            "within rope_parameters.",
            field="hf_overrides",
        )
    return own | {each: _rotation(own[each], change) for each, change in changes.items()}


def _rotation(own: Mapping[str, Any], change: Mapping[str, Any] | None) -> dict[str, Any]:
    """One rotation with a change; None: not scaled."""
    if change is None:
        return {"rope_type": "default"} | {key: own[key] for key in UNSCALED if key in own}
    kind = {"rope_type": change["type"]} if "type" in change else {}  # its name in older configs
    return {**own, **kind, **{key: value for key, value in change.items() if key != "type"}}


def yarn(known: int, length: int) -> dict[str, Any]:
    """hf_overrides by which YaRN (arXiv 2309.00071) stretches the positions of a model that knows so many to
    `length` and no further; empty where they suffice. Attention is of the same kind, over more than it was
    trained for."""
    if length <= known:
        return {}
    rotation = {"rope_type": "yarn", "factor": length / known, "original_max_position_embeddings": known}
    return {"rope_parameters": rotation, "max_position_embeddings": length}
