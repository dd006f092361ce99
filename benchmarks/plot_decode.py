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
    reports = [_load(file) for file in files]
    widest = max(len(_batches(report)) for report in reports)
    figure = Figure(figsize=(4.2 * widest, 3.4 * len(reports)), layout="constrained")
    grid = figure.subplots(len(reports), widest, squeeze=False)
    for axes, report in zip(grid, reports, strict=True):
        for i, axis in enumerate(axes):
            if i < len(batches := _batches(report)):
                _panel(axis, report, batches[i])
            else:
                axis.set_axis_off()
    handles: dict[str, Any] = {}
    for axis in grid.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False)
    with writing(out):
        figure.savefig(out, dpi=120)


def _load(file: Path) -> dict[str, Any]:
    try:
        report = parse_json(file.read_text(encoding="utf-8"))
        known = {"system", "context", "batch", "tokens_per_s"}
        if all(known <= set(row) for row in report["rows"]) and report["rows"]:
            return dict(report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"{str(file)!r} cannot be read as a result ({error}).") from error
    raise InvalidArgumentError(f"{str(file)!r} is no result of `kvreclaim bench decode`; pass one.")


def _batches(report: dict[str, Any]) -> list[int]:
    return sorted({row["batch"] for row in report["rows"]})


def _panel(axis: Axes, report: dict[str, Any], batch: int) -> None:
    points = speeds([row for row in report["rows"] if row["batch"] == batch])
    names = dict.fromkeys(name for systems in points.values() for name in systems)
    forms = list(dict.fromkeys(name.partition(":")[2] for name in names))
    for name in sorted(names, key=lambda name: list(COLORS).index(name.partition(":")[0])):
        system, _, form = name.partition(":")
        style: dict[str, Any] = {
            "color": COLORS[system],
            "linestyle": DASHES[forms.index(form) % len(DASHES)],
        }
        line = [(c, s[name]) for (c, _), s in sorted(points.items()) if s.get(name) is not None]
        if line:
            contexts, values = zip(*line, strict=True)
            axis.plot(contexts, values, marker="o", markersize=4, label=short(name), **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted({context for context, _ in points}))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}k")
    axis.grid(alpha=0.3, which="both")
    first = report["rows"][0]
    axis.set_title(f"{first.get('model', '')}, {batch} sequence{'s' if batch > 1 else ''}", fontsize=10)
    axis.set_xlabel("context")
    axis.set_ylabel("decode tokens/s")


@command
def plot_decode(
    files: Annotated[list[Path], typer.Argument(help="Results of `kvreclaim bench decode`.")],
    out: Annotated[Path, typer.Option(help="The image to write.", callback=picture)] = Path(
        "docs/decode_speed.png"
    ),
) -> None:
    """Chart decode speed over the context from result files."""
    decode_chart(files, out)
