"""The report's charts, as SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvreclaim.eval.report import EvalReport, EvalRow, frontier
from kvreclaim.eval.results import TRACE
from kvreclaim.eval.task import Metric

Style = dict[str, Any]
PANEL_INCHES = (4.6, 3.4)
MARKERS = "osD^vP*Xhp"
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 3)))
HULL: Style = {"color": "0.35", "linewidth": 5.0, "alpha": 0.25, "zorder": 0}


def quality_chart(report: EvalReport) -> str | None:
    """Value against the K/V bytes that a sequence held after its prompt, with intervals; with several
    formats, also the best value for each number of bytes."""

    def draw(axis: Axes, rows: list[EvalRow], style: Style) -> None:
        points = sorted((r for r in rows if r.value is not None and r.bytes_per_token), key=_kib)
        if not points:
            return
        x = [_kib(r) for r in points]
        y = [r.value or 0.0 for r in points]
        low = [max(0.0, v - (r.ci95[0] if r.ci95 else v)) for v, r in zip(y, points, strict=True)]
        high = [max(0.0, (r.ci95[1] if r.ci95 else v) - v) for v, r in zip(y, points, strict=True)]
        axis.errorbar(x, y, yerr=[low, high], capsize=2, markersize=5, linewidth=1.2, **style)

    def finish(axis: Axes, rows: list[EvalRow]) -> None:
        metric = rows[0].metric
        axis.set_xlabel("K/V held, KiB a token of text")
        axis.set_ylabel(metric.value)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        best = frontier(rows)
        if len(report.kv_cache_dtypes) > 1 and best:
            steps = [*map(_kib, best), max(map(_kib, (row for row in rows if row.bytes_per_token)))]
            values = [row.value or 0.0 for row in best]
            axis.step(steps, [*values, values[-1]], where="post", label="best mix", **HULL)
        if metric is not Metric.PERPLEXITY:
            axis.set_ylim(-0.03, 1.03)

    return _by_task(report, draw, finish)


def freed_chart(report: EvalReport) -> str | None:
    """Blocks freed against the budget."""
    return _lines(report, lambda row: row.blocks_freed, "blocks freed, all examples")


def speed_chart(report: EvalReport) -> str | None:
    """Tokens/s against the budget."""
    of = {row.task: row.speed_of for row in reversed(report.rows) if row.speed_of is not None}
    return _lines(
        report, lambda row: row.tokens_per_s if row.speed_of == of.get(row.task) else None, "tokens/s"
    )


def trace_chart(report: EvalReport) -> str | None:
    """Tokens generated against the budget, of tasks with a chain of thought."""
    rows = [row for row in report.rows if TRACE in row.extra]
    return _lines(report.model_copy(update={"rows": rows}), lambda row: row.extra[TRACE], "tokens generated")


def loss_chart(report: EvalReport, task: str) -> str | None:
    """Positions of the evidence of wrong answers: a panel for each budget, a line for each policy, a cell for
    each tenth of the sequence with the share of wrong verdicts; blank: no verdicts."""
    rows = [row for row in report.rows if row.task == task and row.status == "ok" and any(row.asked_at)]
    found = {(row.fraction or row.tokens or 0, row.keeps) for row in rows if row.fraction != 1}
    if not rows:
        return None
    budgets = [budget for _, budget in sorted(found, reverse=True)] or [rows[0].keeps]
    most = max(len([row for row in rows if row.keeps in (budget, "100%")]) for budget in budgets)
    figure, axes = _figure(len(budgets), (PANEL_INCHES[0], 1.2 + 0.26 * most))
    for axis, budget in zip(axes, budgets, strict=False):
        some = [row for row in rows if row.keeps in (budget, "100%")]
        lost, judged = np.array([r.lost_at for r in some]), np.array([r.asked_at for r in some])
        shares = np.divide(lost, judged, out=np.full(lost.shape, np.nan), where=judged > 0)
        axis.grid(visible=False)
        edges = (0.0, 1.0, len(some) - 0.5, -0.5)
        image = axis.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto", extent=edges)
        axis.set_yticks(range(len(some)), [row.policy_label for row in some], fontsize=8)
        axis.set_xlabel("where the evidence stands in the sequence")
        axis.set_title(f"{task}, {budget} kept", fontsize=10)
    figure.colorbar(image, ax=list(axes), label="share lost")
    return _svg(figure)


def turns_chart(report: EvalReport, name: str) -> str | None:
    """Plot a figure of sessions turn by turn: a line per policy and budget, paler for smaller budgets."""

    def draw(axis: Axes, rows: list[EvalRow], style: Style) -> None:
        for i, row in enumerate(sorted(rows, key=lambda row: -(row.budget or 0))):
            shares = getattr(row, name)
            own = {"label": f"{row.name} {row.keeps}", "alpha": 1 - i / (i + 2)}
            axis.plot(range(1, len(shares) + 1), shares, markersize=3, linewidth=1.2, **{**style, **own})

    def finish(axis: Axes, rows: list[EvalRow]) -> None:
        axis.set_xlabel("turn")
        axis.locator_params("x", integer=True)
        axis.set_ylabel("share")
        axis.set_ylim(-0.03, 1.03)

    rows = [row for row in report.rows if getattr(row, name)]
    return _by_task(report.model_copy(update={"rows": rows}), draw, finish)


def _lines(report: EvalReport, value: Callable[[EvalRow], float | None], what: str) -> str | None:
    in_tokens = any(row.tokens for row in report.rows)

    def draw(axis: Axes, rows: list[EvalRow], style: Style) -> None:
        at = ((row.tokens or row.budget or 0) if in_tokens else row.fraction or 0 for row in rows)
        points = sorted((x, y) for x, row in zip(at, rows, strict=True) if (y := value(row)) is not None)
        if points:
            axis.plot(*zip(*points, strict=True), markersize=5, linewidth=1.2, **style)

    def finish(axis: Axes, rows: list[EvalRow]) -> None:
        axis.set_xlabel("budget, tokens" if in_tokens else "share of the full cache's bytes")
        axis.set_ylabel(what if what != "tokens/s" else f"tokens/s of {rows[0].speed_of}")

    return _by_task(report, draw, finish)


def _by_task(
    report: EvalReport,
    draw: Callable[[Axes, list[EvalRow], Style], None],
    finish: Callable[[Axes, list[EvalRow]], None],
) -> str | None:
    """A panel for each task with a line for each policy and KV format."""
    rows = [row for row in report.rows if row.status == "ok"]
    tasks = list(dict.fromkeys(row.task for row in rows))
    if not tasks:
        return None
    styles = _styles(report)
    figure, axes = _figure(len(tasks))
    for axis, task in zip(axes, tasks, strict=False):
        here = [row for row in rows if row.task == task]
        for policy, dtype in dict.fromkeys((row.policy, row.kv_cache_dtype) for row in here):
            line = [row for row in here if (row.policy, row.kv_cache_dtype) == (policy, dtype)]
            draw(axis, line, {**styles[policy, dtype], "label": line[0].name})
        axis.set_title(task, fontsize=10)
        finish(axis, here)
    return _with_legend(figure, axes)


def _styles(report: EvalReport) -> dict[tuple[str, str], Style]:
    """Styles by policy and KV format, equal in all charts. Colours go to whichever has more values, markers
    and dashes to the other; with one format, a policy has its colour and its marker."""
    colours = colormaps["tab20"]
    order = [*range(0, 20, 2), *range(1, 20, 2)]
    dtypes = report.kv_cache_dtypes
    styles: dict[tuple[str, str], Style] = {}
    for i, policy in enumerate(report.policies):
        for j, dtype in enumerate(dtypes):
            more, fewer = (j, i) if len(dtypes) > len(report.policies) else (i, j)
            styles[policy, dtype] = {
                "color": colours(order[more % 20]),
                "marker": MARKERS[(more if len(dtypes) == 1 else fewer) % len(MARKERS)],
                "linestyle": DASHES[fewer % len(DASHES)],
            }
    return styles


def _figure(panels: int, inches: tuple[float, float] = PANEL_INCHES) -> tuple[Figure, Sequence[Axes]]:
    columns = min(3, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(inches[0] * columns, inches[1] * lines + 0.6), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.set_axis_off()
    for axis in axes[:panels]:
        axis.grid(alpha=0.3)
    return figure, axes[:panels]


def _with_legend(figure: Figure, axes: Sequence[Axes]) -> str:
    handles: dict[str, Any] = {}
    for axis in axes:
        found, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    columns = 2 * min(3, len(axes))
    shown = {"loc": "outside lower center", "ncols": columns, "fontsize": 8, "frameon": False}
    figure.legend(list(handles.values()), list(handles), **shown)  # type: ignore[call-overload]
    return _svg(figure)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "kvreclaim"}):  # equal figures give equal files
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()


def _kib(row: EvalRow) -> float:
    return (row.bytes_per_token or 0.0) / 1024
