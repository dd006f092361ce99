"""The demo's tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from kvreclaim.demo.report import DemoReport, LoadRun, PolicyRun

BARS = " ▁▂▃▄▅▆▇█"
CHART_WIDTH = 60


def show_report(console: Console, report: DemoReport) -> None:
    """Print the tables and the small charts."""
    console.print(_policy_table(report))
    console.print(
        "look-ups, carries: teacher-forced accuracy (evidence in the prompt / in the far trace). progress, "
        "exact: free-running, share of the trace before the first error / fully right.\n"
        "efficiency: blocks freed over the blocks that perfect packing would have freed; evicting at random "
        f"without moving anything would reach {_chances(report)}.",
        style="dim",
    )
    smallest = min((run.fraction for run in report.runs if run.fraction is not None), default=None)
    shown = [run for run in report.runs if run.fraction in (None, smallest)]
    _print_charts(console, "blocks in use over time", shown, report.num_blocks)
    console.print(_load_table(report))
    _print_charts(console, "blocks in use over time, under load", report.load, report.num_blocks)


def _chances(report: DemoReport) -> str:
    chances = {
        run.fraction: run.chance_efficiency for run in report.runs if run.chance_efficiency is not None
    }
    return ", ".join(f"{chance:.2f} at {fraction:.0%}" for fraction, chance in chances.items())


def _policy_table(report: DemoReport) -> Table:
    title = (
        f"{report.model}, {report.dtype} on {report.device}, {report.final_length} tokens a sequence, "
        f"{report.num_blocks} blocks of {report.block_size}"
    )
    headers = "policy|budget|look-ups|carries|progress|exact|tokens evicted|blocks freed|efficiency"
    table = _table(title, [*headers.split("|"), "peak blocks", "preemptions", "tokens/s"])
    last: float | None = None
    for run in report.runs:
        if run.fraction != last:
            table.add_section()
            last = run.fraction
        table.add_row(
            run.policy,
            "all" if run.fraction is None else f"{run.fraction:.0%} = {run.budget}",
            f"{run.accuracy:.3f}",
            f"{run.carry_accuracy:.3f}",
            f"{run.progress:.2f}",
            f"{run.exact_match:.2f}",
            f"{run.tokens_evicted:,}",
            f"{run.blocks_freed:,}",
            "-" if run.reclaim_efficiency is None else f"{run.reclaim_efficiency:.2f}",
            str(run.peak_blocks),
            str(run.preemptions),
            f"{run.tokens_per_s:,.0f}",
        )
    return table


def _load_table(report: DemoReport) -> Table:
    first = report.load[0]
    headers = ["policy", "budget", "most running", "mean running", "preemptions", "peak blocks"]
    table = _table(
        f"{first.num_requests} requests at once in the same {report.num_blocks} blocks",
        [*headers, "tokens/s", "seconds", "speed-up"],
    )
    for run in report.load:
        table.add_row(
            run.policy,
            "all" if run.fraction is None else f"{run.fraction:.0%} = {run.budget}",
            str(run.most_running),
            f"{run.mean_running:.1f}",
            str(run.preemptions),
            str(run.peak_blocks),
            f"{run.tokens_per_s:,.0f}",
            f"{run.elapsed_s:.1f}",
            f"{first.elapsed_s / run.elapsed_s:.2f} x",
        )
    return table


def _table(title: str, headers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < 2 else "right")
    return table


def _print_charts(
    console: Console, title: str, runs: Sequence[PolicyRun] | Sequence[LoadRun], num_blocks: int
) -> None:
    console.print(f"\n{title} (full bar: {num_blocks} blocks; length: engine steps)", style="bold")
    longest = max(len(run.blocks_over_time) for run in runs)
    for run in runs:
        width = max(1, round(CHART_WIDTH * len(run.blocks_over_time) / longest))
        console.print(f"{run.label:>20} {_sparkline(run.blocks_over_time, width, num_blocks)}")


def _sparkline(values: Sequence[int], width: int, top: int) -> str:
    """The maximum of each of `width` stretches of the series, as a bar."""
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    peaks = [max(values[a : max(b, a + 1)]) for a, b in pairwise(edges)]
    return "".join(BARS[min(len(BARS) - 1, -(-peak * (len(BARS) - 1) // top))] for peak in peaks)


def draw_report(report: DemoReport, path: Path) -> None:
    """Write the PNG: blocks in use over time, per budget and under load."""
    fractions = sorted({run.fraction for run in report.runs if run.fraction is not None}, reverse=True)
    figure = Figure(figsize=(5 * (len(fractions) + 1), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(fractions) + 1, squeeze=False)[0]
    for axis, fraction in zip(axes, fractions, strict=False):
        for run in report.runs:
            if run.fraction in (None, fraction):
                axis.plot(run.blocks_over_time, label=run.policy)
        axis.set_title(f"budget {fraction:.0%} of {report.final_length} tokens")
    for load in report.load:
        axes[-1].plot(load.blocks_over_time, label=load.label)
    axes[-1].set_title(f"{report.load[0].num_requests} requests at once")
    for axis in axes:
        axis.axhline(report.num_blocks, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xlabel("engine step")
        axis.set_ylabel(f"blocks in use (of {report.num_blocks})")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
