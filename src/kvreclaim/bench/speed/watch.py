"""Steps of a running engine: what each had to do, and how long it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from unittest.mock import patch

from kvreclaim.engine.step.engine import Engine, StepResult
from kvreclaim.plan.cost import StepLoad
from kvreclaim.plan.loads import load_of
from kvreclaim.schedule import StepPlan


@dataclass(slots=True)
class Watched:
    """loads, seconds: of every step that computed something; passes are not in them.

    passes, pass_s: of compression: how many, seconds of all
    """

    loads: list[StepLoad] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    passes: int = 0
    pass_s: float = 0.0

    def extend(self, more: Watched) -> None:
        """Take in what was seen another time."""
        self.loads += more.loads
        self.seconds += more.seconds
        self.passes += more.passes
        self.pass_s += more.pass_s


@contextmanager
def watching(engine: Engine) -> Iterator[Watched]:
    """While it lasts, `engine.step` is measured. Nothing in the engine knows of it."""
    found, seen = Watched(), []
    schedule, step, totals = engine.scheduler.schedule, engine.step, engine.totals

    def scheduled() -> StepPlan:
        plan = schedule()
        seen.append(load_of(plan.rows, engine.lifecycle.sequences, engine.memory))
        return plan

    def stepped() -> StepResult:
        before, passes = totals.score_s + totals.compact_s, totals.compactions
        started = perf_counter()
        result = step()
        elapsed = perf_counter() - started
        spent = totals.score_s + totals.compact_s - before
        found.passes += totals.compactions - passes
        found.pass_s += spent
        load = seen.pop()
        if load.num_tokens:
            found.loads.append(load)
            found.seconds.append(elapsed - spent)
        return result

    with patch.object(engine.scheduler, "schedule", scheduled), patch.object(engine, "step", stepped):
        yield found
