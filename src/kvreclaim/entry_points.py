"""Classes that other packages add to a registry, through entry points (name = "package.module:Class")."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvreclaim.errors import InvalidArgumentError


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """Looked up once in a process: it reads files of every package, and names come with every request."""
    return tuple(entry_points(group=group))


def names_in(group: str) -> set[str]:
    return {point.name for point in installed(group)}


def load(group: str, name: str, noun: str) -> tuple[Any, str] | None:
    """The object of an entry point and where it is; None if there is none.

    noun: what it should be, for the message. Raises: InvalidArgumentError if it cannot be imported.
    """
    for point in (point for point in installed(group) if point.name == name):
        try:
            return point.load(), point.value
        except Exception as error:  # a third party's module may fail in any way
            raise InvalidArgumentError(
                f"{noun} {name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}; "
                "repair or uninstall its package."
            ) from error
    return None
