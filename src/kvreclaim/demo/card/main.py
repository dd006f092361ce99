"""Run the chain in one process after another, and show what became of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from kvreclaim.bench.common import machine
from kvreclaim.demo.card.plan import MIB, REFUSED, CardPlan, CardReport, CardRun, ChainSetup
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.outputs import write_json, writing

ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
"""For the child's malloc: large pieces are unmapped as soon as they are free, and no longer counted."""
COLORS = ("#7f7f7f", "#d62728", "#ff7f0e", "#2ca02c", "#1f77b4", "#9467bd")


def run_card(plan: CardPlan, console: Console, *, command: str) -> CardReport:
    """Every setup in a process of its own. Raises: RuntimeError where one ends with an error of ours."""
    runs = []
    for setup in plan.setups:
        with console.status(f"{setup.name}: a chain of {plan.num_tokens:,} tokens"):
            runs.append(run_alone(plan, setup))
        console.print(f"{setup.name}: {_outcome(runs[-1])}", style="dim")
    return CardReport(
        command=command,
        cpu=str(machine()["cpu"]),
        model=plan.model.name,
        num_tokens=plan.num_tokens,
        card_bytes=plan.card_bytes,
        limit_bytes=plan.limit_bytes,
        runs=runs,
    )


def run_alone(plan: CardPlan, setup: ChainSetup) -> CardRun:
    """One setup in a process with the card's limit. Raises: InvalidArgumentError for a model that cannot be
    loaded; RuntimeError where the process ends with an error of ours."""
    said = {"plan": asdict(plan) | {"model": str(plan.model), "setups": []}, "setup": asdict(setup)}
    command = [sys.executable, "-m", "kvreclaim.demo.card.process", json.dumps(said)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ALLOCATOR)
    if done.returncode == REFUSED:
        raise InvalidArgumentError(done.stderr.strip().splitlines()[-1])
    if done.returncode != 0:
        raise RuntimeError(f"{setup.name}: the process ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return CardRun.model_validate_json(done.stdout.splitlines()[-1])


def present(report: CardReport, console: Console, out: Path, json_file: Path | None) -> None:
    """Print the table; write the chart and, if asked for, the JSON."""
    console.print(
        f"\n{report.model}, {report.cpu}\n"
        f"{report.limit_bytes / MIB:,.0f} MiB beside the libraries' own, "
        f"as of a card of {report.card_bytes / MIB:,.0f} MiB",
        style="bold",
    )
    console.print(_table(report))
    for run in report.runs:
        if run.said:
            console.print(f"{run.name}: {run.said}", style="dim")
    with writing(out):
        draw(report, out)
    console.print(f"chart: {out}")
    if json_file is not None:
        write_json(json_file, report.model_dump(mode="json"))
        console.print(f"figures: {json_file}")


def _outcome(run: CardRun) -> str:
    return f"{run.outcome} at {run.tokens:,} tokens" if run.tokens else run.outcome


def _table(report: CardReport) -> Table:
    title = f"\nOne chain of {report.num_tokens:,} tokens"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ("", "came to", "outcome", "blocks\nof pool", "most\nheld", "freed", "MiB\npeak", "tok/s")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i not in (0, 2) else "left", no_wrap=True)
    for run in report.runs:
        ran = run.tokens > 0
        table.add_row(
            run.name,
            f"{run.tokens:,}",
            run.outcome,
            *(
                (f"{run.num_blocks:,}", f"{run.peak_blocks:,}", f"{run.blocks_freed:,}")
                if ran
                else ("–",) * 3
            ),
            f"{run.peak_bytes / MIB:,.0f}",
            f"{run.tokens_per_s:,.0f}" if ran else "–",
        )
    return table


def draw(report: CardReport, path: Path) -> None:
    """Write the chart: memory of each process while its chain grows, and the line it may not cross."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for run, color in zip(report.runs, COLORS, strict=False):
        if not run.samples:
            continue
        tokens = [sample.tokens for sample in run.samples]
        taken = [(run.weight_bytes + sample.block_bytes) / MIB for sample in run.samples]
        axis.plot(tokens, taken, color=color, label=run.name)
        if run.outcome != "done":
            axis.plot(tokens[-1:], taken[-1:], color=color, marker="X", markersize=10)
    weights = max(run.weight_bytes for run in report.runs)
    axis.axhline(report.limit_bytes / MIB, color="black", linestyle="--", linewidth=1, label="what there is")
    axis.axhspan(0, weights / MIB, color="#dddddd", label="weights")
    axis.set_xlim(0, report.num_tokens)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tokens of the chain so far")
    axis.set_ylabel("MiB of weights and blocks in use")
    figure.legend(fontsize=8, loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=110)
