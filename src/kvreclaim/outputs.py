"""Files that a command writes: refused before it runs if they cannot be written, and reported in one sentence
where that fails at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvreclaim.errors import InvalidArgumentError


def check_writable(path: Path, option: str = "") -> None:
    """Raises: InvalidArgumentError about the option where no such file can be made or replaced."""
    try:
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        fits = folder.is_dir() and not path.is_dir()
        fits = fits and os.access(path if path.exists() else folder, os.W_OK)
    except OSError:  # a name that is too long, or a folder that may not be looked into
        fits = False
    if not fits:
        raise InvalidArgumentError(
            f"{option} {str(path)!r} cannot be written; name a file in a directory that can.".lstrip()
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make its folder; what then fails is one sentence. Raises: InvalidArgumentError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InvalidArgumentError(
            f"{str(path)!r} cannot be written ({error.strerror}); name another file."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write it, and its folder. Raises: InvalidArgumentError."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object: a line for each of its fields, and for each entry of a field that is a list of objects
    or lists. Raises: InvalidArgumentError."""
    fields = (f" {json.dumps(name)}: {_in_lines(value)}" for name, value in content.items())
    write_text(path, "{\n" + ",\n".join(fields) + "\n}\n")


def _in_lines(value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, dict | list) for entry in value):
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
    return json.dumps(value)
