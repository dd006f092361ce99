"""`python -m kvreclaim.compression.spec_table` writes spec/policies.json: what the built-in policies do to
memory, so that plans and simulations read a policy's text without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import Field, fields
from inspect import getattr_static
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kvreclaim.compression.policy import CompressionPolicy, Wrapper, window_of
from kvreclaim.compression.registry import built_in, make_policy
from kvreclaim.errors import InvalidArgumentError

FILE = Path(__file__).parent / "spec" / "policies.json"


def rows() -> dict[str, dict[str, Any]]:
    """Return the rows of spec/traits.py by policy name: options in their order, and

    of a policy that ranks:  eviction_method, window, prompt_only by default; the option that sets the
                             window; the option and value that make it prompt_only
    of a wrapper:            the policy that it wraps by default, its eviction method if it has one of its
                             own, and the traits that its inner policy must not have
    """
    return {name: _row(cls) for name, cls in built_in().items()}


def _row(cls: type[CompressionPolicy]) -> dict[str, Any]:
    options = [field for field in fields(cls) if field.init]  # type: ignore[arg-type]
    row: dict[str, Any] = {"options": [field.name for field in options]}
    policy = make_policy(cls.name)
    if isinstance(policy, Wrapper):
        row |= {"wraps": policy.default_inner, "refuses": sorted(trait.name for trait in policy.unfit)}
        inherited = isinstance(getattr_static(cls, "eviction_method"), property)
        return row if inherited else row | {"eviction_method": policy.eviction_method.name}
    found = _facts(policy)
    row |= found
    for field, value, changed in _variants(cls, options):
        if changed["eviction_method"] != found["eviction_method"]:
            raise TypeError(
                f"policy {cls.name}: {field} changes its eviction method, which the table cannot say"
            )
        if changed["window"] != found["window"]:
            assert changed["window"] == value, f"policy {cls.name}: window is not {field} itself"
            row["window_option"] = field
        if changed["prompt_only"] != found["prompt_only"]:
            row["prompt_only_if"] = [field, value]
    return row


def _facts(policy: CompressionPolicy) -> dict[str, Any]:
    return {
        "eviction_method": policy.eviction_method.name,
        "window": window_of(policy),
        "prompt_only": policy.prompt_only,
    }


def _variants(
    cls: type[CompressionPolicy], options: list[Field[object]]
) -> Iterator[tuple[str, object, dict[str, Any]]]:
    """The policy's properties with one option at another value: all choices of one, the next integers."""
    hints = get_type_hints(cls)
    for field in options:
        default = field.default
        values: tuple[object, ...] = get_args(hints[field.name])
        if isinstance(default, int) and not isinstance(default, bool):
            values = (default + 1, default + 2)
        for value in values:
            try:
                yield field.name, value, _facts(cls(**{field.name: value}))
            except InvalidArgumentError:
                continue


def main() -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
