"""The host's part of a decode step, by phase, without the forward pass.

On a GPU a decode step replays a graph. Here the graph computes nothing and returns the same logits each time,
which leaves the host's work: schedule, fill the graph's inputs, sample, append, detokenize.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from rich.table import Table

from kvreclaim.bench.common import Row, table, text
from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.decode_table import short
from kvreclaim.bench.systems.base import Point
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.execute.graphs import DecodeGraphs
from kvreclaim.engine.step import output_processor

PHASES = ("schedule", "prepare", "build batch", "sample", "done", "process", "compress", "rest")
WARM_UP = 8


@dataclass(slots=True)
class PartTimer:
    """Seconds by part; nested parts each count their full time."""

    total: dict[str, float] = field(default_factory=dict)

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function with the timer."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.total[part] = self.total.get(part, 0.0) + perf_counter() - started

        return run

    def take(self) -> dict[str, float]:
        """Return and reset the seconds."""
        found, self.total = self.total, {}
        return found


@contextmanager
def timers(clock: PartTimer, parts: list[tuple[Any, str, str]]) -> Iterator[None]:
    """Time every (owner, attribute, part) during the block. Owners are modules or instances."""
    with ExitStack() as stack:
        for owner, name, part in parts:
            stack.enter_context(patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        yield


@contextmanager
def without_forward(llm: LLM) -> Iterator[DecodeGraphs]:
    """Replace a decode step's graph by one that computes nothing: its inputs are filled, and its logits are
    the same random numbers each time."""
    engine, runner = llm.engine, llm.engine.runner
    assert engine.config.max_model_len is not None, "the engine's limits are set"
    generator = torch.Generator().manual_seed(1)
    logits = torch.rand(engine.config.max_num_seqs, llm.loaded.vocab_size, generator=generator)
    logits = logits.to(llm.loaded.facts.device)
    graphs = DecodeGraphs(
        runner.model,
        runner.cache,
        engine.backend,  # type: ignore[arg-type]  # is not called
        runner.groups,
        max_num_seqs=engine.config.max_num_seqs,
        max_model_len=engine.config.max_model_len,
        max_chunk=engine.config.max_num_batched_tokens,
        capture=lambda _: lambda: logits,
    )
    with patch.object(runner, "graphs", graphs):
        yield graphs


def python_calls(work: Callable[[], Any]) -> int:
    """Count the calls of Python functions during `work`; each resumption of a generator counts."""
    count = 0

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count - 1  # work itself


def run(plan: DecodePlan) -> list[Row]:
    """Decode at every point of the plan under every one of kvreclaim's systems.

    Returns: rows with `ms`, for each of PHASES the median milliseconds of a step: prepare covers the plan
        and its blocks; build batch fills the graph's inputs; sample checks logits and samples; done commits
        the computed tokens; process appends, detokenizes and ends; compress finds that no pass is due.
        `median_ms` is a step's median without timers, and `calls` are its Python calls. Steps with passes
        are excluded.
    """
    return [_measure(plan, name, point) for name in plan.systems for point in plan.points()]


def _measure(plan: DecodePlan, name: str, point: Point) -> Row:
    system = KvreclaimSystem(name, plan.setup, [point], config=plan.compression(name), kernels=plan.kernels)
    clock, engine = PartTimer(), system.llm.engine
    outputs = engine.output_processor
    parts: list[tuple[Any, str, str]] = [
        (engine.scheduler, "schedule", "schedule"),
        (engine.lifecycle, "follow", "prepare"),
        (engine.runner, "prepare", "prepare"),
        (engine.runner, "forward", "build batch"),
        (outputs, "check_logits", "check"),
        (output_processor, "draw", "draw"),
        (engine.executor, "commit", "done"),
        (outputs, "process", "process"),
        (outputs, "compress", "compress"),
    ]
    times: list[float] = []
    phases: list[dict[str, float]] = []
    calls: list[int] = []
    with closing(system.open(point)) as session, without_forward(system.llm) as graphs:

        def steps(count: int, step: Callable[[], Any]) -> Iterator[tuple[Any, float]]:
            """Yield the result and the milliseconds of each step without passes."""
            for _ in range(count):
                passes, started = engine.totals.compactions, perf_counter()
                result, elapsed_ms = step(), 1e3 * (perf_counter() - started)
                if engine.totals.compactions == passes:
                    yield result, elapsed_ms

        session.run(WARM_UP)
        times += [elapsed_ms for _, elapsed_ms in steps(plan.steps, lambda: session.run(1))]
        with timers(clock, parts):
            for _, elapsed_ms in steps(plan.steps, lambda: (clock.take(), session.run(1))):
                phases.append(_split(clock.take(), elapsed_ms))
        calls += [count for count, _ in steps(WARM_UP, lambda: python_calls(engine.step))]
    assert not graphs.refusals, f"steps were not replayed: {dict(graphs.refusals)}"
    return {
        "system": name,
        **plan.facts(),
        "context": point.context,
        "batch": point.batch,
        "steps": plan.steps,
        "ms": {phase: median(each[phase] for each in phases) for phase in PHASES},
        "median_ms": median(times),
        "calls": median(calls),
        **system.facts(),
    }


def _split(seconds: dict[str, float], step_ms: float) -> dict[str, float]:
    """Compute disjoint phases from nested timers."""
    clock = {part: 1e3 * value for part, value in seconds.items()}
    draw = clock.get("draw", 0.0)
    found = {
        **{phase: clock[phase] for phase in ("schedule", "prepare", "build batch", "done", "compress")},
        "sample": clock["check"] + draw,
        "process": clock["process"] - draw - clock["compress"],
    }
    return found | {"rest": step_ms - sum(found.values())}


def host_table(rows: Sequence[Row]) -> Table:
    """A table with a line for each point, milliseconds by phase."""
    headings = ("system", "context x batch", "step", *PHASES, "calls")
    made = table("host time of a decode step, ms", headings, text_columns=2)
    for row in rows:
        phases = [text(row["ms"][phase], 3) for phase in PHASES]
        place = f"{row['context']:,} x {row['batch']}"
        made.add_row(
            short(row["system"]),
            place,
            text(row["median_ms"], 3),
            *phases,
            text(row["calls"], 0),
        )
    return made
