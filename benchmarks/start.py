"""Seconds from a process's start to the first token of a GGUF file: without a copy of its packed weights,
while one is made, and from it. The file is read once before, so that the disk counts in none.

    python benchmarks/start.py MODEL.gguf
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

COMMAND = (sys.executable, "-m", "kvreclaim.cli.main", "generate", "--prompt", "def add(a, b):")


def seconds(model: Path, home: str, *more: str) -> float:
    """Until the first character is printed."""
    command = [*COMMAND, "--max-tokens", "2", "--model", os.fspath(model), *more]
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"KVRECLAIM_HOME": home, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        taken = time.perf_counter() - start
        process.stdout.read()
    if process.returncode or not first:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    given.model.read_bytes()
    off = "--no-cache-packed-weights"
    with TemporaryDirectory() as home:
        seconds(given.model, home, off)  # config and tokenizer are made of the header
        print(f"{'no copy':10}", [f"{seconds(given.model, home, off):.2f}" for _ in range(given.rounds)])
        print(f"{'making it':10}", f"{seconds(given.model, home):.2f}")
        times = [seconds(given.model, home) for _ in range(given.rounds)]
        print(f"{'from it':10}", [f"{each:.2f}" for each in times], f"median {statistics.median(times):.2f}")


if __name__ == "__main__":
    main()
