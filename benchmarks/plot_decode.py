"""Chart decode speed over the context from results of `kvreclaim bench decode`.

python -m benchmarks plot_decode decode-26m.json decode-0.6b.json --out docs/decode_speed.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.runner import command
from kvreclaim.bench.common import Row
from kvreclaim.bench.decode_table import short, speeds
from kvreclaim.checks import parse_json
from kvreclaim.cli.options import picture
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.outputs import writing

COLORS = {
    "kvreclaim-full": "#1f77b4",
    "kvreclaim-query_mixture": "#2ca02c",
    "kvreclaim-triattention": "#17becf",
    "vllm": "#d62728",
    "transformers-cb": "#ff7f0e",
    "transformers": "#7f7f7f",
}
DASHES = ("-", "--", "-.", ":")


def decode_chart(files: Sequence[Path], out: Path) -> None:
    """Tokens/s over the context, a panel for each batch, a row for each file; written as an image.

    Raises: InvalidArgumentError for a file that is no result of `bench decode`.
    """
    by_batch = [_load(file) for file in files]
    widest = max(map(len, by_batch))
    figure = Figure(figsize=(4.2 * widest, 3.4 * len(files)), layout="constrained")
    handles: dict[str, Any] = {}
    for axes, found in zip(figure.subplots(len(files), widest, squeeze=False), by_batch, strict=True):
        for axis in axes[len(found) :]:
            axis.set_axis_off()
        for axis, (batch, rows) in zip(axes, found.items(), strict=False):
            _panel(axis, rows, batch)
            handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False)
    with writing(out):
        figure.savefig(out, dpi=120)


def _load(file: Path) -> dict[int, list[Row]]:
    """Rows by batch."""
    found: dict[int, list[Row]] = {}
    try:
        for row in parse_json(file.read_text(encoding="utf-8"))["rows"]:
            row["system"], row["context"], row["tokens_per_s"]
            found.setdefault(row["batch"], []).append(row)
    except (OSError, ValueError, KeyError, TypeError):
        found.clear()
    if not found:
        raise InvalidArgumentError(
            f"{str(file)!r} is no result of `kvreclaim bench decode`; pass one."
        ) from None
    return dict(sorted(found.items()))


def _panel(axis: Axes, rows: Sequence[Row], batch: int) -> None:
    points = speeds(rows)
    names = dict.fromkeys(name for systems in points.values() for name in systems)
    forms = list(dict.fromkeys(name.partition(":")[2] for name in names))
    for name in sorted(names, key=lambda name: list(COLORS).index(name.partition(":")[0])):
        system, _, form = name.partition(":")
        dashes = DASHES[forms.index(form) % len(DASHES)]
        line = [(c, s[name]) for (c, _), s in sorted(points.items()) if s.get(name) is not None]
        style: dict[str, Any] = {"color": COLORS[system], "linestyle": dashes, "markersize": 4}
        axis.plot(*zip(*line, strict=True), marker="o", label=short(name), **style)
    axis.set(xlabel="context", ylabel="decode tokens/s", yscale="log")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({context for context, _ in points}))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
    axis.grid(alpha=0.3, which="both")
    title = f"{rows[0].get('model', '')}, {batch} sequence{'s' if batch > 1 else ''}"
    axis.set_title(title, fontsize=10)


@command
def plot_decode(
    files: Annotated[list[Path], typer.Argument(help="Results of `kvreclaim bench decode`.")],
    out: Annotated[Path, typer.Option(help="The image to write.", callback=picture)] = Path(
        "docs/decode_speed.png"
    ),
) -> None:
    """Chart decode speed over the context from result files."""
    decode_chart(files, out)
