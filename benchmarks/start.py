"""Seconds from a process's start to the first token of a GGUF file, and to the process's end: with weights
that are packed at the start, and from the copy of packed weights. One start before them is not counted: it
compiles byte code, reads the file and makes the copy. All starts have to say the same token.

    python benchmarks/start.py MODEL.gguf
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

COMMAND = (sys.executable, "-c", "from kvreclaim.cli.main import main; main()")
PROMPT = "def f"
HOW = {"no copy": ("--no-cache-packed-weights",), "copy": ()}


@dataclass(frozen=True)
class Start:
    """text: what was printed; seconds until its first byte, and until the end"""

    text: str
    first_s: float
    end_s: float


def start(model: Path, home: str, *more: str) -> Start:
    """One process, with one token to generate."""
    asked = ("--prompt", PROMPT, "--max-tokens", "1", "--model", os.fspath(model))
    command = [*COMMAND, "generate", *asked, *more]
    env = os.environ | {"KVRECLAIM_HOME": home, "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        first_s = time.perf_counter() - began
        text = first + process.stdout.read()
        errors = process.stderr.read()
        process.wait()
        end_s = time.perf_counter() - began
    if process.returncode or not text.strip():
        said = errors.decode(errors="replace")[-500:]
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {said}")
    return Start(text.decode(), first_s, end_s)


def cpu() -> str:
    """The CPU's name, as the system says it."""
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if sys.dont_write_bytecode:
        raise SystemExit(
            "Python writes no byte code here (PYTHONDONTWRITEBYTECODE or -B), so each start would compile "
            "all modules anew: unset the variable."
        )
    with TemporaryDirectory() as home:
        wanted = start(given.model, home).text
        done: dict[str, list[Start]] = {name: [] for name in HOW}
        for _ in range(given.rounds):
            for name, options in HOW.items():
                done[name].append(start(given.model, home, *options))
                if done[name][-1].text != wanted:
                    raise SystemExit(f"{name}: {done[name][-1].text!r} was generated, and first {wanted!r}")
    found = {
        name: {
            "first_token_s": round(statistics.median(each.first_s for each in starts), 2),
            "end_s": round(statistics.median(each.end_s for each in starts), 2),
            "all_first_token_s": [round(each.first_s, 2) for each in starts],
            "all_end_s": [round(each.end_s, 2) for each in starts],
        }
        for name, starts in done.items()
    }
    about = {"model": given.model.name, "cpu": cpu(), "num_cpus": os.cpu_count(), "token": wanted.strip()}
    versions = {name: version(name) for name in ("torch", "transformers")}
    print(json.dumps({**about, **versions, **found}, indent=1))


if __name__ == "__main__":
    main()
