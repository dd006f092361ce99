"""The demo's tables and charts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from kvreclaim.bench.common import Columns, cells
from kvreclaim.demo.real import TASKS as REAL_TASKS
from kvreclaim.demo.report import DemoReport, PolicyRun, PoolRun, RealReport

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
ROOM = POLICY | {
    "most\nrun": "{most_running}",
    "pre-\nempted": "{preemptions}",
    "peak\nblocks": "{peak_blocks}",
}
LOAD = ROOM | {
    "tok/s": "{tokens_per_s:,.0f}",
    "secs": "{elapsed_s:.1f}",
    "longest\nwait, s": "{longest_wait_s:.1f}",
}
TEXT = {
    "policy": "{policy}",
    "of the\nbytes": "{fraction:.0%}",
    "digits\nright": "{needles:.3f}",
    "perplexity\nof prose": "{perplexity:.2f}",
    "KiB\nheld": "{kib:,.0f}",
    "blocks\nfreed": "{blocks_freed:,}",
}
BARS = " ▁▂▃▄▅▆▇█"
CHART_WIDTH = 56


def show_report(console: Console, report: DemoReport) -> None:
    """Print the tables and the small charts; all of it fits 80 columns."""
    console.print(
        f"\n{report.model}, {report.dtype} on {report.device}: {report.final_length} tokens a sequence, "
        f"pool of {report.num_blocks} blocks of {report.block_size} tokens",
        style="bold",
    )
    console.print(_table("What it costs", COST, report.runs))
    console.print(
        "accuracy: teacher-forced, look-ups (evidence in the prompt) and carries (in the far trace). "
        "progress, exact: free-running, share of the trace before the first error, share fully right.",
        style="dim",
    )
    console.print(_table("What it gives", GAIN, report.runs))
    console.print(
        "freed in place: blocks that would have come free had no survivor moved. efficiency: blocks freed "
        "over what perfect packing would have freed. Evicting at random without moving anything would reach "
        f"{_chances(report)}.",
        style="dim",
    )
    smallest = min((run.fraction for run in report.runs if run.fraction is not None), default=None)
    shown = [run for run in report.runs if run.fraction in (None, smallest)]
    _print_charts(console, "blocks in use over time", shown, report.num_blocks)
    crowd = f"{report.load[0].num_requests} requests at once in the same {report.num_blocks} blocks"
    console.print(_table(crowd, LOAD, report.load, ruled=False))
    _print_charts(console, "blocks in use over time, under load", report.load, report.num_blocks)


def show_real(console: Console, report: RealReport) -> None:
    """Print what happened on the real model."""
    console.print(f"\n{report.model}, {report.dtype} on {report.device}: a real language model", style="bold")
    console.print(_text_table(report))
    console.print(
        f"Prose of {report.num_tokens} tokens with eight codes in it, compressed before anything is asked; "
        "then digits of the codes, teacher-forced, and the perplexity of what the prose goes on to say.",
        style="dim",
    )
    console.print(f"\nAsked about {report.num_talk_tokens} tokens of text with a code in it", style="bold")
    for each in report.asked:
        console.print(f"{each.question} [dim](it is {each.code})[/dim]")
        for label, answer in each.answers.items():
            console.print(f"{label:>24}  {'right' if each.code in answer else 'wrong'}  {answer!r}")
    crowd = (
        f"{report.load[0].num_requests} conversations about {report.num_load_tokens} tokens each at once in "
        f"{report.num_blocks} blocks"
    )
    console.print(_table(crowd, ROOM, report.load, ruled=False))
    _print_charts(console, "blocks in use over time", report.load, report.num_blocks)


def _text_table(report: RealReport) -> Table:
    """A line for each policy and budget, both tasks side by side."""
    table = Table(
        title="\nWhat stays", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for i, heading in enumerate(TEXT):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    needles, prose = ([row for row in report.rows if row.task == task] for task in REAL_TASKS)
    pairs = sorted(zip(needles, prose, strict=True), key=lambda pair: -(pair[0].fraction or 0))
    rows = [
        needle.model_dump()
        | {"needles": needle.value, "perplexity": read.value}
        | {"kib": None if needle.kv_bytes is None else needle.kv_bytes / 2**10}
        for needle, read in pairs
    ]
    for line, (row, _), after in zip(cells(TEXT, rows), pairs, [*pairs[1:], pairs[-1]], strict=True):
        table.add_row(*line, end_section=after[0].fraction != row.fraction)
    return table


def _chances(report: DemoReport) -> str:
    chances = {
        run.fraction: run.chance_efficiency for run in report.runs if run.chance_efficiency is not None
    }
    return ", ".join(f"{chance:.2f} at {fraction:.0%}" for fraction, chance in chances.items())


def _table(title: str, columns: Columns, runs: Sequence[PoolRun], *, ruled: bool = True) -> Table:
    """A line for each run; ruled: with a rule between budgets."""
    table = Table(
        title=f"\n{title}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for i, heading in enumerate(columns):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    rows = [run.model_dump() | {"keeps": run.keeps} for run in runs]
    for line, run, after in zip(cells(columns, rows), runs, [*runs[1:], runs[-1]], strict=True):
        table.add_row(*line, end_section=ruled and after.fraction != run.fraction)
    return table


def _print_charts(console: Console, title: str, runs: Sequence[PoolRun], num_blocks: int) -> None:
    console.print(f"\n{title} (full bar: {num_blocks} blocks; length: engine steps)", style="bold")
    longest = max(len(run.blocks_over_time) for run in runs)
    for run in runs:
        width = max(1, round(CHART_WIDTH * len(run.blocks_over_time) / longest))
        console.print(f"{run.label:>20} {_sparkline(run.blocks_over_time, width, num_blocks)}")


def _sparkline(values: Sequence[int], width: int, top: int) -> str:
    """Return the maximum of each of `width` stretches of the series, as a bar."""
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    peaks = [max(values[a : max(b, a + 1)]) for a, b in pairwise(edges)]
    return "".join(BARS[min(len(BARS) - 1, -(-peak * (len(BARS) - 1) // top))] for peak in peaks)


def _alike(runs: Sequence[PolicyRun]) -> list[tuple[str, tuple[int, ...]]]:
    """(policies, series): policies that held the same blocks at every step share a line."""
    lines: dict[tuple[int, ...], list[str]] = {}
    for run in runs:
        lines.setdefault(tuple(run.blocks_over_time), []).append(run.policy)
    return [("\n".join(policies), series) for series, policies in lines.items()]


def draw_report(report: DemoReport, path: Path) -> None:
    """Write the PNG: blocks in use over time, per budget and under load."""
    fractions = sorted({run.fraction for run in report.runs if run.fraction is not None}, reverse=True)
    figure = Figure(figsize=(5 * (len(fractions) + 1), 4), layout="constrained")
    axes = figure.subplots(1, len(fractions) + 1, squeeze=False)[0]
    for axis, fraction in zip(axes, fractions, strict=False):
        for policies, series in _alike([run for run in report.runs if run.fraction in (None, fraction)]):
            axis.plot(series, label=policies)
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


def draw_real(report: RealReport, path: Path) -> None:
    """Write the PNG: what each policy keeps of the codes over its bytes, and blocks in use under load."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = [row for row in report.rows if row.task == REAL_TASKS[0]]
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
    for load in report.load:
        right.plot(load.blocks_over_time, label=load.label)
    right.axhline(report.num_blocks, color="grey", linewidth=0.8, linestyle=":")
    right.set_xlabel(f"engine step; {report.load[0].num_requests} requests at once")
    right.set_ylabel(f"blocks in use (of {report.num_blocks})")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
