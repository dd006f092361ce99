"""One part of `make gpu`: `python -m scripts.gpu.session PART OUT [--tiny]`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.gpu.__main__ import PARTS

MOST_TEXT = 2000


@dataclass
class Session:
    """What a part gets: where its rows go, and whether it is to run at toy sizes on a CPU. It counts the
    measurements that failed."""

    out: Path
    part: str
    is_tiny: bool = False
    num_failed: int = 0

    def __post_init__(self) -> None:
        self.device, self.dtype = ("cpu", "float32") if self.is_tiny else ("cuda", "bfloat16")

    def add(self, **row: Any) -> None:
        """Append a row at once."""
        line = json.dumps({"part": self.part, **row}, default=str)
        with (self.out / "session.jsonl").open("a", encoding="utf-8") as out:
            out.write(line + "\n")

    @contextmanager
    def trying(self, **row: Any) -> Iterator[None]:
        """What fails inside is a row with `failed`, and the part goes on."""
        try:
            yield
        except Exception as error:
            self.num_failed += 1
            text = traceback.format_exc()[-MOST_TEXT:]
            self.add(**row, failed=f"{type(error).__name__}: {error}"[:500], text=text)

    def run(self) -> None:
        """Run the part. Raises: SystemExit where a measurement failed."""
        module, _, name = PARTS[self.part][0].partition(":")
        getattr(import_module(f"scripts.gpu.{module}"), name)(self)
        if self.num_failed:
            sys.exit(f"{self.num_failed} measurements failed; the page lists them")


if __name__ == "__main__":
    part, out, *options = sys.argv[1:]
    Session(Path(out), part, "--tiny" in options).run()
