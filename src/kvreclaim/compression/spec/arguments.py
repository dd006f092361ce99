"""Arguments of a policy spec by option, with the same errors with and without the policy's class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvreclaim.compression.spec.grammar import Spec, Value
from kvreclaim.errors import InvalidArgumentError

WRAPPED = "inner"
"""The option of a wrapper that holds the policy that it wraps."""


def named_arguments(spec: Spec, names: Sequence[str]) -> dict[str, Value]:
    """Return every argument under the name of its option.

    names: the policy's options in their order; WRAPPED among them makes it a wrapper; its arguments may
           stand without names, the policy first

    Raises: InvalidArgumentError for one out of place, given twice, or a policy where a value must stand.
    """
    order = [WRAPPED, *(name for name in names if name != WRAPPED)] if WRAPPED in names else []
    given: dict[str, Value] = {}
    for place, (option, value) in enumerate(spec.args):
        if option is None and not order:
            raise InvalidArgumentError(
                f"policy {spec.name} wraps no other policy and takes its options by name; "
                + _takes(names, f"write {spec.name}({names[0]}=…)" if names else "")
            )
        if option is None and (place >= len(order) or any(name for name, _ in spec.args[:place])):
            raise InvalidArgumentError(
                f"policy {spec.name} is given {value!r} out of place; unnamed arguments come first, and it "
                f"takes {len(order)}: {', '.join(order)}."
            )
        name = order[place] if option is None else option
        if name in given:
            raise InvalidArgumentError(f"policy {spec.name} is given the option {name!r} twice; keep one.")
        if isinstance(value, Spec) and name != WRAPPED and name in names:
            raise InvalidArgumentError(
                f"policy {spec.name}, option {name!r}: {value.name}(…) is a policy; write a plain value."
            )
        given[name] = value
    return given


def refuse_unknown(policy: str, names: Sequence[str], given: Iterable[str]) -> None:
    """Check option names. Raises: InvalidArgumentError for one that the policy lacks."""
    for option in given:
        if option not in names:
            listed = [name for name in names if name != WRAPPED]
            takes = f"its options are {', '.join(listed)}" if listed else "it has no options"
            raise InvalidArgumentError(f"policy {policy} has no option {option!r}; {takes}.")


def wrapped(policy: str, value: object) -> Spec:
    """Return the policy under WRAPPED. Raises: InvalidArgumentError if it is no policy."""
    if isinstance(value, str):
        value = Spec(value)
    if not isinstance(value, Spec):
        raise InvalidArgumentError(
            f"policy {policy} is given {value!r} to wrap; write a policy first: {policy}(knorm, …)."
        )
    return value


def _takes(names: Sequence[str], remedy: str) -> str:
    return f"its options are {', '.join(names)}: {remedy}." if names else "it has no options."
