"""Pool, queue and hits over simulated time, one line per run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvreclaim.outputs import writing

COLORS = ("#d62728", "#2ca02c", "#1f77b4", "#9467bd")
PANELS = (
    ("blocks", "blocks in use"),
    ("running", "running requests"),
    ("waiting", "waiting requests"),
    ("hit_rate", "found of the prompts"),
)


def chart(reports: Mapping[str, dict[str, Any]], out: Path) -> None:
    """reports: by the name of the run, what sim.report gave."""
    figure = Figure(figsize=(9, 9.5), layout="constrained")
    grid = figure.subplots(len(PANELS), 1, sharex=True)
    for axis, (what, label) in zip(grid, PANELS, strict=True):
        for color, (name, report) in zip(COLORS, reports.items(), strict=False):
            _line(axis, report["timeline"], what, name, color)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    first = next(iter(reports.values()))
    pool = first["num_blocks"] * first["replicas"]
    grid[0].axhline(pool, color="#7f7f7f", linestyle="--", linewidth=1, label="all pools")
    grid[-1].set_xlabel("simulated seconds")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    title = (
        f"{first['trace']}: {first['requests']:,} requests, {first['replicas']} replicas, {first['router']}"
    )
    figure.suptitle(title, fontsize=11)
    with writing(out):
        figure.savefig(out, dpi=120)


def _line(axis: Axes, timeline: dict[str, list[Any]], what: str, name: str, color: str) -> None:
    points = [(t, y) for t, y in zip(timeline["at_s"], timeline[what], strict=True) if y is not None]
    axis.plot(
        [t for t, _ in points], [y for _, y in points], color=color, linewidth=1.1, label=name, alpha=0.85
    )
