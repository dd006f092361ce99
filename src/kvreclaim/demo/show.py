"""The demo's tables and charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from kvreclaim.demo.report import DemoReport, PolicyRun, PoolRun

BARS = " ▁▂▃▄▅▆▇█"
CHART_WIDTH = 56


def show_report(console: Console, report: DemoReport) -> None:
    """Print the tables and the small charts; all of it fits 80 columns."""
    console.print(
        f"\n{report.model}, {report.dtype} on {report.device}: {report.final_length} tokens a sequence, "
        f"pool of {report.num_blocks} blocks of {report.block_size} tokens",
        style="bold",
    )
    console.print(_cost_table(report))
    console.print(
        "accuracy: teacher-forced, look-ups (evidence in the prompt) and carries (in the far trace). "
        "progress, exact: free-running, share of the trace before the first error, share fully right.",
        style="dim",
    )
    console.print(_gain_table(report))
    console.print(
        "efficiency: blocks freed over what perfect packing would have freed. Evicting at random without "
        f"moving anything would reach {_chances(report)}.",
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


def _cost_table(report: DemoReport) -> Table:
    table = _table(
        "What it costs", ["policy", "keeps", "accuracy", "look-ups", "carries", "progress", "exact"]
    )
    for run in _by_budget(report, table):
        teacher_forced = (run.accuracy, run.lookup_accuracy, run.carry_accuracy)
        table.add_row(
            run.policy, _keeps(run), *(f"{x:.3f}" for x in (*teacher_forced, run.progress, run.exact_match))
        )
    return table


def _gain_table(report: DemoReport) -> Table:
    headers = ["tokens\nevicted", "blocks\nfreed", "effi-\nciency", "peak\nblocks", "pre-\nempted"]
    table = _table("What it gives", ["policy", "keeps", *headers, "tok/s"])
    for run in _by_budget(report, table):
        table.add_row(
            run.policy,
            _keeps(run),
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
    headers = ["most\nrun", "mean\nrun", "pre-\nempted", "peak\nblocks", "tok/s", "secs"]
    title = f"{first.num_requests} requests at once in the same {report.num_blocks} blocks"
    table = _table(title, ["policy", "keeps", *headers, "faster"])
    for run in report.load:
        table.add_row(
            run.policy,
            _keeps(run),
            str(run.most_running),
            f"{run.mean_running:.1f}",
            str(run.preemptions),
            str(run.peak_blocks),
            f"{run.tokens_per_s:,.0f}",
            f"{run.elapsed_s:.1f}",
            f"{first.elapsed_s / run.elapsed_s:.2f}x",
        )
    return table


def _by_budget(report: DemoReport, table: Table) -> Iterator[PolicyRun]:
    """The runs, with a rule in the table between budgets."""
    for before, run in zip([None, *report.runs], report.runs, strict=False):
        if before is not None and before.fraction != run.fraction:
            table.add_section()
        yield run


def _keeps(run: PoolRun) -> str:
    return "all" if run.fraction is None else f"{run.fraction:.0%}"


def _table(title: str, headers: Sequence[str]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _print_charts(console: Console, title: str, runs: Sequence[PoolRun], num_blocks: int) -> None:
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
