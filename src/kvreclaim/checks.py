"""Checks of what a caller gave, with one wording: what, got, allowed.

field: what the error is about, where that is not the name that the sentence begins with, or this is no name
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from kvreclaim.errors import InvalidArgumentError


def require(condition: bool, message: str, field: str | None = None) -> None:
    """Raises InvalidArgumentError with this sentence about this field unless the condition holds."""
    if not condition:
        raise InvalidArgumentError(message, field=field)


def check_known(noun: str, name: str, known: Collection[str], field: str | None = None) -> None:
    """Raises InvalidArgumentError, with the nearest known name, unless the name is known."""
    near = () if name in known else get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    require(name in known, f"{noun} {name!r} is unknown; {meant}known are {', '.join(known)}.", field)


def is_int(value: object) -> bool:
    """A real integer; True and False are not numbers of anything."""
    return isinstance(value, int) and not isinstance(value, bool)


def _one_word(name: str) -> str | None:
    return name if name.isidentifier() else None


def check_int(
    name: str,
    value: object,
    minimum: int,
    remedy: str = "",
    *,
    maximum: int | None = None,
    field: str | None = None,
) -> None:
    """Raises InvalidArgumentError unless value is an int >= minimum, and <= maximum if there is one."""
    wrong = None
    if not isinstance(value, int) or not is_int(value) or value < minimum:
        wrong = f">= {minimum}"
    elif maximum is not None and value > maximum:
        wrong = f"<= {maximum}"
    require(
        wrong is None,
        f"{name} is {value!r}; it must be an integer {wrong}{remedy}.",
        field or _one_word(name),
    )


def check_number(name: str, value: object, low: float, high: float, *, field: str | None = None) -> None:
    """Raises InvalidArgumentError unless value is a real number in [low, high]."""
    fits = (is_int(value) or isinstance(value, float)) and low <= value <= high  # type: ignore[operator]
    require(fits, f"{name} is {value!r}; it must be a number from {low} to {high}.", field or _one_word(name))


def check_bool(name: str, value: object) -> None:
    """Raises InvalidArgumentError unless value is True or False."""
    require(isinstance(value, bool), f"{name} is {value!r}; it must be true or false.", _one_word(name))


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raises InvalidArgumentError unless value is one of allowed."""
    known = list(allowed)
    require(value in known, f"{name} is {value!r}; it must be one of {', '.join(map(str, known))}.", name)


MAX_OFFSETS = 64
MAX_OFFSET = 1 << 30


def check_offsets(name: str, value: object) -> tuple[int, ...]:
    """A list or tuple of 1 to MAX_OFFSETS integers from 0 to MAX_OFFSET, as a tuple."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise InvalidArgumentError(
            f"{name} is {value!r}; it must be a non-empty list of integers >= 0.", field=name
        )
    require(
        len(value) <= MAX_OFFSETS,
        f"{name} has {len(value)} entries; at most {MAX_OFFSETS} are allowed; pass fewer.",
        name,
    )
    for item in value:
        check_int(f"an entry of {name}", item, 0, maximum=MAX_OFFSET, field=name)
    return tuple(value)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises: ValueError, also if it is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_text(name: str, value: str, field: str) -> None:
    """Text that can be written as UTF-8: JSON can name a lone surrogate, which no tokenizer takes."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{name} holds the lone surrogate {value[error.start]!r} at character {error.start}, half of a "
            "pair that makes a character; send both halves, or remove it.",
            field=field,
        ) from None
