"""`kvreclaim serve` in processes of its own, on a free port."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from steering import until

KVRECLAIM = Path(sys.executable).parent / "kvreclaim"


@dataclass
class Served:
    process: subprocess.Popen
    base_url: str
    log: Path

    @property
    def engine(self) -> psutil.Process:
        [child] = psutil.Process(self.process.pid).children()
        return child


@contextmanager
def served(tmp_path: Path, *options: str, model: tuple[str, ...] = ("--model", "demo")) -> Iterator[Served]:
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [KVRECLAIM, "serve", *model, "--port", "0", "--log-format", "json", *options]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: "at http://" in log.read_text() or process.poll() is not None)
        found = re.search(r"at (http://[\d.:]+)", log.read_text())
        assert found is not None, log.read_text()
        yield Served(process, found[1], log)
    finally:
        process.kill()
        process.wait()
