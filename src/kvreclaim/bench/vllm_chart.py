"""The pool of vLLM over time, with and without the plugin, as an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvreclaim.bench.common import Row
from kvreclaim.bench.vllm_pool import WITH, WITHOUT
from kvreclaim.outputs import writing

COLORS = {WITHOUT: "#d62728", WITH: "#2ca02c"}


def pool_chart(rows: Sequence[Row], out: Path) -> None:
    """A column for each case: blocks in use above, running requests below, over seconds."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(5.2 * len(cases), 5.2), layout="constrained")
    grid = figure.subplots(2, len(cases), squeeze=False, sharex="col")
    for i, case in enumerate(cases):
        own = [row for row in rows if row["case"] == case]
        _panel(grid[0][i], own, "blocks", "blocks in use")
        grid[0][i].axhline(
            own[0]["num_blocks"], color="#7f7f7f", linestyle="--", linewidth=1, label="the pool"
        )
        grid[0][i].set_title(f"{case} tokens, budget {own[-1]['budget']}", fontsize=10)
        _panel(grid[1][i], own, "running", "running requests")
        grid[1][i].set_xlabel("seconds")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    with writing(out):
        figure.savefig(out, dpi=120)


def _panel(axis: Axes, rows: Sequence[Row], what: str, label: str) -> None:
    for row in rows:
        line = row["timeline"]
        axis.plot(line["at_s"], line[what], color=COLORS[row["system"]], linewidth=1.2, label=row["system"])
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    axis.set_ylabel(label)
