"""Run the demo; print its tables; write its charts and figures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter
from rich import box
from rich.console import Console

from kvreclaim.bench.common import Columns, sheet
from kvreclaim.demo.real import TASKS, RealPlan, run_real
from kvreclaim.demo.toy import POLICIES, DemoPlan, Row, label, run_load, run_policies
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.report import EvalReport
from kvreclaim.eval.show import progress_bar
from kvreclaim.outputs import write_json

POLICY = {"policy": "{policy}", "keeps": "{keeps}"}
COST = POLICY | {
    "accuracy": "{accuracy:.3f}",
    "look-ups": "{lookup_accuracy:.3f}",
    "carries": "{carry_accuracy:.3f}",
    "progress": "{progress:.3f}",
    "exact": "{exact_match:.3f}",
}
GAIN = POLICY | {
    "tokens\nevicted": "{tokens_evicted:,}",
    "blocks\nfreed": "{blocks_freed:,}",
    "freed in\nplace": "{freed_in_place:,}",
    "effi-\nciency": "{reclaim_efficiency:.2f}",
    "peak\nblocks": "{peak_blocks}",
    "pre-\nempted": "{preemptions}",
    "tok/s": "{tokens_per_s:,.0f}",
}
LOAD = POLICY | {
    "most\nrun": "{most_running}",
    "pre-\nempted": "{preemptions}",
    "peak\nblocks": "{peak_blocks}",
    "tok/s": "{tokens_per_s:,.0f}",
    "secs": "{elapsed_s:.1f}",
    "longest\nwait, s": "{longest_wait_s:.1f}",
}
TEXT = POLICY | {
    "digits\nright": "{needles:.3f}",
    "perplexity\nof prose": "{perplexity:.2f}",
    "KiB\nheld": "{kib:,.0f}",
    "blocks\nfreed": "{blocks_freed:,}",
}


def run_toy(model: Path, plan: DemoPlan, console: Console, out: Path) -> dict[str, Any]:
    """Measure, print and draw the demo model's part. Returns: what the JSON file has of it."""
    llm = LLM(
        model,
        num_blocks=plan.num_blocks,
        max_num_seqs=64,
        block_size=plan.block_size,
        max_model_len=plan.final_length,
        kv_cache_dtype=plan.kv_cache_dtype,
    )
    console.print(llm.engine.kernels)
    with progress_bar(console) as on_start:
        on_progress = on_start(3 + len(plan.fractions) * len(POLICIES))
        runs = run_policies(plan, llm, lambda name: on_progress(name, 1))
        load = run_load(plan, llm, lambda name: on_progress(name, 1))
    facts = llm.loaded.facts
    made = {
        "model": facts.name,
        "kernels": llm.engine.kernels,
        "kv_cache_dtype": llm.engine.kv_format.name,
        "block_size": plan.block_size,
        "num_blocks": plan.num_blocks,
        "kv_bytes_per_block": llm.engine.cache.bytes_per_block,
        "final_length": plan.final_length,
        "num_scored": plan.num_scored,
        "runs": runs,
        "load": load,
    }
    console.print(
        f"\n{facts.name} (a toy): {plan.final_length} tokens a sequence, pool of {plan.num_blocks} blocks of "
        f"{plan.block_size} tokens",
        style="bold",
    )
    _show(console, "What it costs", COST, runs)
    console.print(
        "accuracy: teacher-forced, look-ups (evidence in the prompt) and carries (in the far trace). "
        "progress, exact: free-running, share of the trace before the first error, share fully right.",
        style="dim",
    )
    _show(console, "What it gives", GAIN, runs)
    # A block of S slots is empty with probability (1 - r)^S if the share r of the tokens stays at random.
    chances = ", ".join(f"{(1 - f) ** plan.block_size:.2f} at {f:.0%}" for f in plan.fractions)
    console.print(
        "freed in place: blocks that would have come free had no survivor moved. efficiency: blocks freed "
        "over what perfect packing would have freed. Random eviction without moving anything would reach "
        f"{chances}.",
        style="dim",
    )
    _show(console, f"{plan.num_load} requests at once in the same {plan.num_blocks} blocks", LOAD, load)
    _draw_toy(runs, load, plan, out / "blocks_over_time.png")
    return made


def run_language_model(model: Path, plan: RealPlan, console: Console, out: Path) -> dict[str, Any]:
    """Measure, print and draw the language model's part. Returns: what the JSON file has of it."""
    with progress_bar(console) as on_start:
        on_progress = on_start(2 + len(plan.fractions))
        made = run_real(model, plan, lambda name: on_progress(name, 1))
    title = (
        f"{made['model']}: {plan.num_load} conversations of {plan.num_load_tokens} tokens at once "
        f"in {plan.num_blocks} blocks"
    )
    _show(console, title, LOAD, made["load"])
    console.print(
        f"\nProse of {plan.num_tokens} tokens with eight codes in it, compressed before any question; then "
        "digits of the codes, teacher-forced, and the perplexity of the prose's continuation."
    )
    _show(console, "What stays", TEXT, _text_rows(made["eval"]))
    _draw_real(made["eval"], made["load"], plan.num_blocks, out / "real_model.png")
    return made | {"eval": made["eval"].model_dump(mode="json"), "num_blocks": plan.num_blocks}


def run_demo(
    toy: tuple[Path, DemoPlan],
    real: tuple[Path, RealPlan] | None,
    console: Console,
    out: Path,
    json: Path | None,
    *,
    threads: int = 1,
) -> None:
    """Run both parts; without a language model, only the toy. threads: of the demo model"""
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    if real is None:
        console.print("No language model is installed; `make real-model` fetches the one of the first part.")
        shown = {}
    else:
        shown = {"real": run_language_model(*real, console, out)}
    torch.set_num_threads(threads)
    figures = run_toy(*toy, console, out) | shown
    console.print(f"\ncharts: {', '.join(map(str, sorted(out.glob('*.png'))))}")
    if json is not None:
        write_json(json, figures)
        console.print(f"figures: {json}")
    console.print(f"the demo took {time.perf_counter() - started:.0f} s")


def _text_rows(report: EvalReport) -> list[Row]:
    """Return a row for each policy and share, both tasks next to each other."""
    pairs = sorted(zip(*map(report.of, TASKS), strict=True), key=lambda pair: -(pair[0].fraction or 0))
    return [
        needles.model_dump()
        | {"keeps": needles.keeps, "needles": needles.value, "perplexity": prose.value}
        | {"kib": None if needles.kv_bytes is None else needles.kv_bytes / 2**10}
        for needles, prose in pairs
    ]


def _show(console: Console, title: str, columns: Columns, rows: Sequence[Row]) -> None:
    """Print a table that fits 80 columns."""
    made = sheet(f"\n{title}", columns, rows)
    made.box, made.title_justify, made.pad_edge, made.padding = box.SIMPLE_HEAD, "left", False, (0, 1, 0, 0)
    made.columns[0].overflow = "fold"
    console.print(made)


def _draw_toy(runs: Sequence[Row], load: Sequence[Row], plan: DemoPlan, path: Path) -> None:
    """Write the PNG: blocks in use over time, per budget and under load."""
    figure = Figure(figsize=(5 * (len(plan.fractions) + 1), 4), layout="constrained")
    axes = figure.subplots(1, len(plan.fractions) + 1, squeeze=False)[0]
    for axis, fraction in zip(axes, plan.fractions, strict=False):
        lines: dict[tuple[int, ...], list[str]] = {}  # policies that held the same blocks share a line
        for row in runs:
            if row["fraction"] in (None, fraction):
                lines.setdefault(tuple(row["blocks_over_time"]), []).append(row["policy"])
        _draw_blocks(axis, {"\n".join(names): series for series, names in lines.items()}, plan.num_blocks)
        axis.set_title(f"budget {fraction:.0%} of {plan.final_length} tokens")
    _draw_load(axes[-1], load, plan.num_blocks)
    figure.savefig(path, dpi=110)


def _draw_real(report: EvalReport, load: Sequence[Row], num_blocks: int, path: Path) -> None:
    """Write the PNG: what each policy keeps of the codes over its bytes, and blocks in use under load."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = report.of(TASKS[0])
    whole = next(row for row in rows if row.fraction == 1)
    for policy in dict.fromkeys(row.policy for row in rows if row is not whole):
        points = sorted((row.fraction, row.value) for row in rows if row.policy == policy)
        left.plot(*zip(*points, (1.0, whole.value), strict=True), marker="o", label=policy)
    left.set_xscale("log")
    left.set_xticks(sorted({row.fraction or 0 for row in rows}))
    left.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_xlabel("share of the full cache's bytes")
    left.set_ylabel("digits of the codes right")
    left.set_ylim(0, 1)
    left.legend(fontsize=7)
    _draw_load(right, load, num_blocks)
    figure.savefig(path, dpi=110)


def _draw_load(axis: Axes, load: Sequence[Row], num_blocks: int) -> None:
    lines = {label(row["policy"], row["fraction"]): row["blocks_over_time"] for row in load}
    _draw_blocks(axis, lines, num_blocks)
    axis.set_title(f"{load[0]['num_requests']} requests at once")


def _draw_blocks(axis: Axes, lines: dict[str, Sequence[int]], num_blocks: int) -> None:
    for name, series in lines.items():
        axis.plot(series, label=name)
    axis.axhline(num_blocks, color="grey", linewidth=0.8, linestyle=":")
    axis.set_xlabel("engine step")
    axis.set_ylabel(f"blocks in use (of {num_blocks})")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)
