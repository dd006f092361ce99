"""One part of `make gpu`: `python -m scripts.gpu.session PART OUT [--tiny]`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

FUNCTIONS = {
    "facts": "kernels:facts",
    "first tests": "tests:first",
    "decode": "engine:decode",
    "kernels": "kernels:kernels",
    "peers": "engine:peers",
    "serve": "engine:serve",
    "kernel tests": "tests:kernels",
    "engine tests": "tests:engine",
}
"""Module and function of each part."""
MOST_TEXT = 2000


@dataclass
class Session:
    """What a part gets: where its rows go, and whether it is to run at toy sizes on a CPU. It counts the
    measurements that failed."""

    out: Path
    part: str
    is_tiny: bool
    num_failed: int = 0

    @property
    def file(self) -> Path:
        return self.out / "session.jsonl"

    @property
    def device(self) -> str:
        return "cpu" if self.is_tiny else "cuda"

    @property
    def dtype(self) -> str:
        return "float32" if self.is_tiny else "bfloat16"

    def add(self, **row: Any) -> None:
        """Append a row at once."""
        line = json.dumps({"part": self.part, **row}, default=str)
        with self.file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")

    @contextmanager
    def trying(self, **row: Any) -> Iterator[None]:
        """What fails inside is a row with `error`, and the part goes on."""
        try:
            yield
        except Exception as error:
            text = traceback.format_exc()[-MOST_TEXT:]
            self.num_failed += 1
            self.add(**row, error=f"{type(error).__name__}: {error}"[:500], text=text)


def function(part: str) -> Callable[[Session], None]:
    module, _, name = FUNCTIONS[part].partition(":")
    found: Callable[[Session], None] = getattr(import_module(f"scripts.gpu.{module}"), name)
    return found


if __name__ == "__main__":
    part, out, *options = sys.argv[1:]
    session = Session(Path(out), part, "--tiny" in options)
    function(part)(session)
    if session.num_failed:
        sys.exit(f"{session.num_failed} measurements failed; the page lists them")
