"""Classes that other packages add to a registry, through entry points (name = "package.module:Class")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, cast

from kvreclaim.errors import InvalidArgumentError

T = TypeVar("T")


@cache
def installed(group: str) -> tuple[EntryPoint, ...]:
    """Looked up once in a process: it reads files of every package, and names come with every request."""
    return tuple(entry_points(group=group))


def names(built_in: Mapping[str, type[T]], group: str) -> tuple[str, ...]:
    """Built-in names, then those of third parties in alphabetical order."""
    return (*built_in, *sorted({point.name for point in installed(group)} - built_in.keys()))


def find(
    built_in: Mapping[str, type[T]], group: str, name: str, noun: str, base: type, *, is_data: bool = True
) -> type[T] | None:
    """The class of this name, which no third party takes over from those that are built in; None: unknown.

    base, is_data: what it derives from, and whether it is a dataclass

    Raises: InvalidArgumentError for an entry point that is none of these.
    """
    if name in built_in:
        return built_in[name]
    if not (found := _load(group, name, noun)):
        return None
    cls, place = found
    if not (isinstance(cls, type) and issubclass(cls, base) and (is_dataclass(cls) or not is_data)):
        problem = "is no dataclass derived" if is_data else "does not derive"
        raise InvalidArgumentError(f"{noun} {name!r} is {place!r}, which {problem} from {base.__name__}.")
    return cast(type[T], cls)


def _load(group: str, name: str, noun: str) -> tuple[Any, str] | None:
    """Return the object of an entry point and where it is; None if there is none.

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
