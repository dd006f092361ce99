"""The time of this machine's steps, fitted to steps of a random load; requests at given times."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter, sleep
from unittest.mock import patch

from kvreclaim.bench.common import machine, versions
from kvreclaim.bench.plans import SpeedPlan
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.step.engine import Engine, StepResult
from kvreclaim.plan.cost import StepLoad, load_of
from kvreclaim.plan.fit import MIN_STEPS, Fitted, fit_steps
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.schedule import StepPlan

TURN = 24
"""Requests that end before the concurrency is drawn anew."""
IDLE_S = 0.0002


@dataclass(frozen=True, slots=True)
class Timed:
    """A request: seconds from the beginning, tokens."""

    arrival_s: float
    num_prompt: int
    num_output: int


@dataclass(slots=True)
class ServedRequest:
    """Times of one request, in seconds since the start."""

    first_token_s: float
    end_s: float


def draw(rng: random.Random, low: int, high: int) -> int:
    """Draw log-uniformly: equally many short and long ones."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def keep_busy(llm: LLM, seconds: float, *, longest: int, rng: random.Random) -> None:
    """Serve random requests for this time, at changing concurrency; prompts and answers up to `longest`
    tokens. Remaining requests are aborted."""
    engine, most = llm.engine, llm.engine.config.max_num_seqs
    number, ended, at_once = 0, 0, most
    until = perf_counter() + seconds
    while perf_counter() < until:
        while len(engine.requests) < at_once:
            _add(llm, number, _prompt(llm, draw(rng, 8, longest), rng), draw(rng, 8, longest))
            number += 1
        ended += sum(request.finished for request in engine.step().requests)
        if ended >= TURN:
            ended, at_once = 0, draw(rng, 1, most)
    for request_id in list(engine.requests):
        engine.abort(request_id)


def replay(llm: LLM, requests: Sequence[Timed], rng: random.Random) -> list[ServedRequest]:
    """Serve requests that arrive at their times, in order, in real time."""
    engine = llm.engine
    prompts = [_prompt(llm, timed.num_prompt, rng) for timed in requests]
    coming = list(enumerate(requests))[::-1]
    began = perf_counter()
    first: dict[str, float] = {}
    end: dict[str, float] = {}
    while coming or engine.has_unfinished:
        while coming and coming[-1][1].arrival_s <= perf_counter() - began:
            number, timed = coming.pop()
            _add(llm, number, prompts[number], timed.num_output)
        if not engine.has_unfinished:
            sleep(IDLE_S)
            continue
        touched = engine.step().requests
        now = perf_counter() - began
        for request in touched:
            _note(request, now, first, end)
    return [ServedRequest(first[str(number)], end[str(number)]) for number in range(len(requests))]


def _note(request: Request, now: float, first: dict[str, float], end: dict[str, float]) -> None:
    if request.sequences and request.sequences[0].num_generated:
        first.setdefault(request.request_id, now)
    if request.finished:
        end[request.request_id] = now


def _prompt(llm: LLM, num_tokens: int, rng: random.Random) -> list[int]:
    size = llm.loaded.model.config.get_text_config().vocab_size
    return [rng.randrange(5, size) for _ in range(num_tokens)]


def _add(llm: LLM, number: int, prompt: list[int], num_output: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    compressor = None if llm.compression is None else llm.compressor(llm.compression)
    llm.engine.add_request(str(number), prompt, params, compressor)


@dataclass(slots=True)
class Watched:
    """loads, seconds: of every step that computed something, without passes.

    passes, pass_s: number and total seconds of compression passes
    """

    loads: list[StepLoad] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    passes: int = 0
    pass_s: float = 0.0


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


def calibrate(plan: SpeedPlan, llm: LLM) -> Fitted:
    """Fit steps of a random load; longer on a slow machine, until there are enough."""
    longest = min(plan.longest, llm.engine.max_model_len // 2)
    keep_busy(llm, WARM_S, longest=longest, rng=random.Random(plan.seed))
    rng = random.Random(plan.seed + 1)
    with watching(llm.engine) as seen:
        keep_busy(llm, plan.seconds, longest=longest, rng=rng)
        while len(seen.loads) < MIN_STEPS:
            keep_busy(llm, plan.seconds, longest=longest, rng=rng)
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
