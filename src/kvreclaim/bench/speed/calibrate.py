"""The time of this machine's steps, fitted to steps of a random load."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from unittest.mock import patch

from kvreclaim.bench.common import machine, versions
from kvreclaim.bench.plans import SpeedPlan
from kvreclaim.bench.speed.traffic import keep_busy
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.step.engine import Engine, StepResult
from kvreclaim.plan.cost import StepLoad, load_of
from kvreclaim.plan.fit import MIN_STEPS, Fitted, fit_steps
from kvreclaim.schedule import StepPlan


@dataclass(slots=True)
class Watched:
    """loads, seconds: of every step that computed something, without passes.

    passes, pass_s: number and total seconds of compression passes
    """

    loads: list[StepLoad] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    passes: int = 0
    pass_s: float = 0.0

    def extend(self, more: Watched) -> None:
        """Merge another observation."""
        self.loads += more.loads
        self.seconds += more.seconds
        self.passes += more.passes
        self.pass_s += more.pass_s


@contextmanager
def watching(engine: Engine) -> Iterator[Watched]:
    """Measure `engine.step` during the block, from outside."""
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


WARM_S = 3.0


def engine_of(plan: SpeedPlan) -> LLM:
    """Build an engine without prefix caching, because the requests are random."""
    return LLM(
        str(plan.model),
        dtype=plan.dtype,
        num_blocks=plan.num_blocks,
        max_num_seqs=plan.max_num_seqs,
        enable_prefix_caching=False,
        compression=plan.policy(plan.compress),
    )


def observe(plan: SpeedPlan, llm: LLM, seconds: float, seed: int = 0) -> Watched:
    """Observe steps of a random load; longer on a slow machine, until there are enough for a fit."""
    longest = min(plan.longest, llm.engine.max_model_len // 2)
    keep_busy(llm, WARM_S, longest=longest, rng=random.Random(plan.seed + 2 * seed))
    rng = random.Random(plan.seed + 2 * seed + 1)
    with watching(llm.engine) as seen:
        keep_busy(llm, seconds, longest=longest, rng=rng)
        while len(seen.loads) < MIN_STEPS:
            keep_busy(llm, seconds, longest=longest, rng=rng)
    return seen


def fit(plan: SpeedPlan, llm: LLM, seen: Watched) -> Fitted:
    """Raises: InvalidArgumentError for too few steps."""
    config, where = llm.engine.config, machine()
    facts = {
        "kind": "steps of kvreclaim's engine",
        **plan.facts(),
        "policy": plan.compress,
        "block_size": config.block_size,
        "kv_cache_dtype": llm.engine.kv_format.name,
        "kernels": llm.engine.kernels,
        "device": where.get("gpu", where["cpu"]),
        "versions": versions(),
    }
    fitted = fit_steps(seen.loads, seen.seconds, **facts)
    per_pass = seen.pass_s / seen.passes if seen.passes else 0.0
    return replace(fitted, cost=replace(fitted.cost, compaction=per_pass))


def calibrate(plan: SpeedPlan, llm: LLM) -> Fitted:
    """Serve the load and fit."""
    return fit(plan, llm, observe(plan, llm, plan.seconds))
