"""All that needs a CUDA device: tests of kernels, CUDA graphs and engine, benchmarks, the plugin inside vLLM.

    make gpu OPTIONS="--limit-s 840 --parts tests:triton,bench"

Each part is a process with a time limit of its own. After each, gpu.json and the page gpu.md in --out hold
what is known. A later call with the same --out runs what has not ended, and of tests those without outcome.
Ends with 1 where a part failed or has not ended, with 2 where there is no CUDA device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from kvreclaim.bench import common
from kvreclaim.bench.common import Row
from kvreclaim.checks import check_choice, require
from kvreclaim.cli.bench_options import command_line, ready, script
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.options import check_options, option
from kvreclaim.outputs import write_json, write_text
from scripts.gpu_page import page
from scripts.gpu_parts import ROOT, Part, every_part
from scripts.outcomes import BROKEN, read, write

LEAST_S = 10.0
"""No part starts with less time left."""
ENDED = ("passed", "failed")


@dataclass(frozen=True, kw_only=True)
class GpuPlan:
    """What runs, in which order, and for how long."""

    out: Path = option(
        Path("gpu_out"), "Directory of results, logs and the page; a later call goes on in it."
    )
    limit_s: int = option(840, "Seconds for all parts together.", low=1)
    parts: tuple[str, ...] = option(
        (),
        "Parts, or the kinds tests, bench, vllm, comma-separated, in this order; without it, all by value.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        names = [part.name for part in every_part()]
        for name in self.parts:
            check_choice("an entry of --parts", name, [*kinds(names), *names])

    def chosen(self) -> list[Part]:
        known = every_part()
        found = [part for name in self.parts for part in known if name in (part.name, *kinds([part.name]))]
        return list({part.name: part for part in found or known}.values())


def kinds(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.partition(":")[0] for name in names))


def require_gpu() -> None:
    """Raises: InvalidArgumentError without a CUDA device."""
    import torch

    require(
        torch.cuda.is_available(),
        f"torch {torch.__version__} finds no CUDA device on this machine; run `make gpu` on one that has an "
        "NVIDIA GPU, with a CUDA build of torch.",
    )


def run(plan: GpuPlan) -> list[Row]:
    """Run the parts that have not ended, and write what is known after each. Returns: all rows."""
    head, rows = common.report([], command_line()), {}
    file, until = plan.out / "gpu.json", monotonic() + plan.limit_s
    if file.exists():
        known = json.loads(file.read_text(encoding="utf-8"))
        require(
            same(known) == same(head),
            f"{file} is of another commit, GPU or version of a package; name another --out.",
        )
        rows = {row["part"]: row for row in known["rows"]}

    def keep(row: Row) -> None:
        rows[row["part"]] = row
        write_json(file, head | {"rows": list(rows.values())})
        write_text(plan.out / "gpu.md", page(head, list(rows.values())))

    for part in in_turn(plan.chosen(), rows):
        before = rows.get(part.name, {}).get("elapsed_s", 0.0)
        row: Row = {"part": part.name, "elapsed_s": before}
        if (why := part.missing()) is not None:
            keep(row | {"state": "left out", "why": why})
        elif until - monotonic() < LEAST_S:
            keep(row | so_far(part, plan, f"the limit of {plan.limit_s} s came first"))
        else:
            keep(row | so_far(part, plan, "the whole run was ended from outside"))
            start = monotonic()
            ended = run_part(part, plan.out, min(start + part.limit_s, until))
            keep(row | ended | {"elapsed_s": before + monotonic() - start})
        typer.echo("{part}: {state} {why}".format_map(rows[part.name]).rstrip())
    return list(rows.values())


def same(head: Row) -> list[object]:
    """What all results of a file have in common."""
    return [head["machine"].get("gpu"), head["versions"], head["commit"]]


def in_turn(parts: Sequence[Part], rows: dict[str, Row]) -> list[Part]:
    """Parts that have not ended; benchmarks that a limit stopped come last, since they begin anew."""
    left = [part for part in parts if rows.get(part.name, {}).get("state") not in ENDED]
    return sorted(left, key=lambda part: not part.tests and rows.get(part.name, {}).get("elapsed_s", 0) > 0)


def so_far(part: Part, plan: GpuPlan, why: str) -> Row:
    """What a part that has not ended has given."""
    found = tally(part.file(plan.out, ".jsonl")) if part.tests else {}
    return found | {"state": "stopped", "why": why}


def run_part(part: Part, out: Path, until: float) -> Row:
    """state, why, and what its tests or its benchmark gave."""
    log = part.file(out, ".log")
    if part.tests:
        return run_tests(part, out, log, until)
    figures = part.file(out, ".json")
    code = run_process(part, ("--json", str(figures.absolute())), log, until)
    if code == 0:
        found = json.loads(figures.read_text(encoding="utf-8"))
        return {"state": "passed", "why": ""} | {name: found.get(name) for name in ("rows", "bandwidth")}
    return ended_with(code, log)


def run_tests(part: Part, out: Path, log: Path, until: float) -> Row:
    """In as many processes as crashes and failures that break CUDA ask for."""
    file = part.file(out, ".jsonl").absolute()
    while True:
        code = run_process(part, ("-p", "outcomes", "--outcomes", str(file)), log, until)
        running = tally(file)["running"]
        if code is not None and code < 0 and running:
            write(file, test=running, outcome="crashed", why=signal.Signals(-code).name)
        elif code != BROKEN:
            break
    found = tally(file)
    if code in (0, 1, 5):
        return found | {"state": "failed" if found["bad"] else "passed", "why": ""}
    return found | ended_with(code, log)


def ended_with(code: int | None, log: Path) -> Row:
    if code is None:
        return {"state": "stopped", "why": "a time limit came first"}
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
    return {"state": "failed", "why": f"status {code}: {lines[-1][:300]}"}


def tally(file: Path) -> Row:
    """Counts of outcomes; bad: tests that failed or crashed; skips: how many by reason; running: a test that
    started and has not ended."""
    lines = read(file)
    last = {line["test"]: line for line in lines if "test" in line}
    ended = [line for line in last.values() if "outcome" in line]
    return {
        "collected": max((line["collected"] for line in lines if "collected" in line), default=None),
        "outcomes": Counter(line["outcome"] for line in ended),
        "bad": [line for line in ended if line["outcome"] in ("failed", "crashed")],
        "skips": Counter(line["why"] for line in ended if line["outcome"] == "skipped"),
        "running": next((name for name, line in last.items() if "outcome" not in line), None),
    }


def run_process(part: Part, more: Sequence[str], log: Path, until: float) -> int | None:
    """Exit status, negative for a signal; None where the time came first. Leaves no process behind."""
    path = os.pathsep.join(filter(None, (str(ROOT / "scripts"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **part.environment}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        child = subprocess.Popen(
            [sys.executable, *part.arguments, *more],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            return child.wait(max(0.0, until - monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@script
def app(plan: Annotated[GpuPlan, ConfigOptions(config=GpuPlan)]) -> None:
    """Run on a CUDA device what needs one, and write gpu.json and gpu.md."""
    with ready(os.cpu_count() or 1):
        require_gpu()
        rows = run(plan)
    typer.echo(plan.out / "gpu.md")
    raise typer.Exit(any(row["state"] in ("failed", "stopped") for row in rows))


if __name__ == "__main__":
    app()
