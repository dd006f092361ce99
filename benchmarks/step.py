"""Time of a decode step, part by part.

python benchmarks/step.py --systems full,triattention --contexts 1024,16384 --batches 1,8
python benchmarks/step.py --no-forward --systems "full,ada_kv(knorm)" --contexts 4096 --batches 32,64
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from statistics import median
from time import perf_counter
from typing import Annotated
from unittest.mock import patch

import typer
from rich.table import Table

from kvreclaim.bench import host_steps
from kvreclaim.bench.common import Row, table, text
from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.decode_table import short
from kvreclaim.bench.patches import PartTimer, TimedOps, timers
from kvreclaim.bench.systems.base import Point
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.cli.bench import SHARED, decode_plan
from kvreclaim.cli.bench_options import Json, publish, ready, script
from kvreclaim.cli.config_options import ConfigOptions

PARTS = ("schedule", "batch", "model", "attention", "write K/V", "sample", "commit", "compress", "rest")


def run(plan: DecodePlan) -> list[Row]:
    """Decode at every point of the plan under every one of kvreclaim's systems.

    Returns: rows with `ms`, for each of PARTS the mean milliseconds of a step: batch is building the step's
        tensors; model is the forward pass less attention and K/V writes; sample is all that happens to
        logits and drawn tokens, detokenising included; rest is what no timer covers.
        `median_ms` is a step's median with the timers on, `plain_ms` without them.
    """
    return [_measure(plan, name, point) for name in plan.systems for point in plan.points()]


def _measure(plan: DecodePlan, name: str, point: Point) -> Row:
    system = KvreclaimSystem(name, plan.setup, [point], config=plan.compression(name), kernels=plan.kernels)
    clock, engine = PartTimer(), system.llm.engine
    steps = -(-plan.steps // system.multiple) * system.multiple
    runner = engine.runner
    parts = [
        (engine.scheduler, "schedule", "schedule"),
        (runner, "forward", "forward"),
        (system.llm.loaded.model, "forward", "whole model"),
        (engine.output_processor, "check_logits", "logits"),
        (engine.output_processor, "process", "logits"),
        (engine.scheduler, "done", "commit"),
        (engine.compression, "run", "compress"),
    ]
    times = []
    with closing(system.open(point)) as session:
        session.run(8)
        plain = session.run(steps)
        with timers(clock, parts), patch.object(runner, "ops", TimedOps(runner.ops, clock)):
            for _ in range(steps):
                started = perf_counter()
                session.run(1)
                times.append(perf_counter() - started)
    clocked = {part: 1e3 * value / steps for part, value in clock.take().items()}
    return {
        "system": name,
        **plan.facts(),
        "context": point.context,
        "batch": point.batch,
        "steps": steps,
        "ms": _split(clocked, 1e3 * sum(times) / steps),
        "median_ms": 1e3 * median(times),
        "plain_ms": 1e3 * plain.elapsed_s / plain.steps,
        **system.facts(),
    }


def _split(clock: dict[str, float], step_ms: float) -> dict[str, float]:
    """Parts that do not overlap, from timers that lie inside each other."""
    attention, write = clock.get("paged_attention", 0.0), clock.get("write_kv", 0.0)
    model = clock.get("whole model", 0.0)
    parts = {
        "schedule": clock.get("schedule", 0.0),
        "batch": clock.get("forward", 0.0) - model,
        "model": model - attention - write,
        "attention": attention,
        "write K/V": write,
        "sample": clock.get("logits", 0.0) - clock.get("compress", 0.0),
        "commit": clock.get("commit", 0.0),
        "compress": clock.get("compress", 0.0),
    }
    return parts | {"rest": step_ms - sum(parts.values())}


def step_table(rows: Sequence[Row]) -> Table:
    """For people: two lines for each point, milliseconds and shares."""
    headings = ("system", "context x batch", "step", *PARTS)
    made = table("a decode step, ms", headings, text_columns=2)
    for row in rows:
        parts = [row["ms"][part] for part in PARTS]
        place = f"{row['context']:,} x {row['batch']}"
        made.add_row(short(row["system"]), place, text(row["plain_ms"]), *map(text, parts))
        made.add_row("", "", "", *(f"{part / sum(parts):.1%}" for part in parts), style="dim")
    return made


@script
def app(
    plan: Annotated[
        DecodePlan,
        ConfigOptions(
            config=DecodePlan,
            only=("systems", "contexts", "batches", "steps", "budget", "interval", *SHARED),
            defaults={"systems": ("full", "triattention"), "contexts": (1024, 16384), "batches": (1, 8)},
            build=decode_plan,
        ),
    ],
    forward: Annotated[
        bool, typer.Option("--forward/--no-forward", help="Compute forward passes, or time the host alone.")
    ] = True,
    json_file: Json = None,
) -> None:
    """Where a decode step's time goes: schedule, batch, model, attention, sample, compress."""
    with ready(plan.threads):
        rows = run(plan) if forward else host_steps.run(plan)
        publish(rows, [step_table(rows) if forward else host_steps.host_table(rows)], json_file)


if __name__ == "__main__":
    app()
