"""Classes that other packages add to a registry, through entry points (name = "package.module:Class")."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from kvreclaim.errors import InvalidArgumentError


def names_in(group: str) -> set[str]:
    return {point.name for point in entry_points(group=group)}


def load(group: str, name: str, noun: str) -> tuple[Any, str] | None:
    """What the name stands for, and where it is; None if nobody has it.

    noun: what it should be, for the message. Raises: InvalidArgumentError if it cannot be imported.
    """
    for point in entry_points(group=group, name=name):
        try:
            return point.load(), point.value
        except Exception as error:  # a third party's module may fail in any way
            raise InvalidArgumentError(
                f"{noun} {name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}; "
                "repair or uninstall its package."
            ) from error
    return None
