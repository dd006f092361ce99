"""Decode speed of kvreclaim and its peers over contexts and batches, on one model directory.

Measured: tokens per second of all sequences together while each decodes after `context` cached tokens.
Prefill, start-up and the first token are excluded in every system:

- kvreclaim: the time of `engine.step()` calls with only decodes. A slice of a compressing policy is a whole
  number of intervals, so that each sequence is compressed as often as in the long run.
- vLLM: likewise with `LLMEngine.step()`, in its own process and environment, the engine core in that process
  (nothing runs ahead between two slices, and no second process competes for the cores).
- llama.cpp: the time of llama_decode and of choosing the likeliest tokens, in its own process too.
- transformers `generate`: from the first new token to the last, by a stopping criterion that reads the
  clock, on a DynamicCache that is cut back afterwards.

Filling the cache: with fill "prefill" every system computes its prompts. With "synthetic", the default, each
system admits, schedules and stores the prompts normally, but the model's forward pass is replaced by writing
random keys and values into the given slots (transformers' `generate` gets a cache object of random tensors;
llama.cpp one with the keys and values of 512 computed tokens repeated). Decoding costs the same for any
numbers, and 32 x 32k tokens take seconds instead of an hour, in every system. Prompts differ from the first
token on, so no block is shared. While the last prompts are being filled the first ones may decode: their
contexts are longer by at most `Point.overshoot`.

Timing: all systems that fit into memory together are open at once and take turns, `rounds` times, each round
starting with another one; the result is the median over rounds, with the spread (largest over smallest). Same
threads, same dtype. Runs before the first round do not count. Slow systems get shorter slices. Systems that
would exceed memory or the time limit are reported as skipped, with the reason.

Nothing is timed before the systems have drawn the model's greedy tokens (verify.py); in a KV format other
than the model's, those of the reference back-end in that format.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console

from kvreclaim.bench.common import Row, alternate, seconds, spread, wide_console
from kvreclaim.bench.decode_plan import AUTO, DecodePlan
from kvreclaim.bench.plans import LLAMACPP
from kvreclaim.bench.systems.base import Point, Session, SkipPoint, System, SystemSetup, random_prompts
from kvreclaim.bench.systems.hf import Generate
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.bench.systems.worker_process import LlamaCpp, Vllm
from kvreclaim.bench.verify import (
    FormatReferee,
    Judge,
    PackedReferee,
    Referee,
    TokenAgreement,
    require_agreement,
)
from kvreclaim.free_memory import free_host_memory_bytes
from kvreclaim.model.loader import read_config


def vocab_size(model: Path) -> int:
    return int(read_config(model).get_text_config().vocab_size)


def time_prompt(plan: DecodePlan, length: int, systems: Mapping[str, System]) -> list[Row]:
    """Return one row for each system; prompts differ, so nothing is cached. The first round does not
    count."""
    size = vocab_size(plan.model)
    warm_up, *given = (random_prompts(1, length, size, seed) for seed in range(plan.rounds + 1))
    for system in systems.values():
        system.generate(warm_up, 1)
    turns = {name: iter(given) for name in systems}

    def timed(name: str) -> float:
        prompts = next(turns[name])
        return seconds(lambda: systems[name].generate(prompts, 1))

    elapsed = alternate({name: partial(timed, name) for name in systems}, plan.rounds)
    return [
        {
            "system": name,
            "prompt": length,
            "tokens_per_s": length / median(values),
            "first_token_s": median(values),
            "rounds": len(values),
            "spread": spread(values),
        }
        for name, values in elapsed.items()
    ]


MEMORY_SHARE = 0.85
WARM_UPS = 3
PAUSE_S = 0.25
"""Between slices: OpenMP's idle threads spin for a while after the last parallel loop of another process."""


@dataclass(slots=True)
class DecodeResult:
    """rows and prompts as in the file; checks: greedy agreement; versions: the peers'."""

    rows: list[Row] = field(default_factory=list)
    prompts: list[Row] = field(default_factory=list)
    checks: list[TokenAgreement] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def make_system(plan: DecodePlan, name: str, setup: SystemSetup, points: list[Point]) -> System:
    """Load a system by its name."""
    if name == "transformers":
        return Generate(setup)
    if name == "vllm":
        assert plan.vllm_python is not None, "checked in __post_init__"
        return Vllm(setup, points, python=plan.vllm_python, eager=not plan.vllm_compile)
    if name in LLAMACPP:
        return LlamaCpp(name, setup, python=plan.llamacpp_python, cache_type=LLAMACPP[name])
    return KvreclaimSystem(
        name,
        setup,
        points,
        config=plan.compression(name),
        kernels=plan.kernels,
        kv_cache_dtype=plan.kv_cache_dtype(name),
        activations=plan.activations_of(name),
    )


def verify(
    plan: DecodePlan, console: Console, *, prompt_tokens: int = 96, max_tokens: int = 24
) -> list[TokenAgreement]:
    """Greedy tokens of every system, in fp32 and in the dtype that is timed. Raises: WrongTokensError."""
    is_packed = plan.model.suffix == ".gguf"
    model = PackedReferee(plan.model) if is_packed else Referee(plan.model)
    referees: dict[str, Judge] = {AUTO: model}
    prompts = random_prompts(4, prompt_tokens, vocab_size(plan.model), seed=7)
    points = [Point(prompt_tokens, len(prompts), max_tokens)]
    results = []
    for name in plan.names:
        if plan.compression(name) is not None and plan.budget < prompt_tokens + max_tokens:
            continue  # up to its budget a policy is the full cache, beyond it has no such oracle
        form = AUTO if is_packed else plan.kv_cache_dtype(name)
        if form not in referees:
            assert isinstance(model, Referee), "packed weights have one judge"
            referees[form] = FormatReferee(plan.model, form, model)
        for dtype in dict.fromkeys((plan.dtype,) if is_packed else ("float32", plan.dtype)):
            if plan.compression(name) is not None and dtype != plan.dtype:
                continue
            console.print(f"verify {name} in {dtype}", style="dim")
            with closing(
                make_system(plan, name, SystemSetup(plan.model, dtype, plan.threads), points)
            ) as system:
                answers = system.generate(prompts, max_tokens)
            results.append(referees[form].judge(name, dtype, prompts, answers))
    require_agreement(results)
    return results


def run(plan: DecodePlan, console: Console | None = None, *, check: bool = True) -> DecodeResult:
    """Verify, then time every point. Raises: WrongTokensError, InvalidArgumentError."""
    console = console or wide_console(stderr=True)
    result = DecodeResult()
    if check:
        result.checks = verify(plan, console)
    grid = plan.points()
    most = [*grid, *(Point(length, 1, 1) for length in plan.prompts)]
    with ExitStack() as stack:
        systems: dict[str, System] = {}
        for name in plan.names:
            console.print(f"load {name}", style="dim")
            system = systems[name] = make_system(plan, name, plan.setup, most)
            stack.callback(system.close)
            result.versions |= system.versions()
        paces: dict[str, Pace] = {name: Pace() for name in systems}
        for length in plan.prompts:
            for row in time_prompt(plan, length, systems):
                result.prompts.append(row | _facts(plan, systems[row["system"]], result.checks))
                _print_row(console, row)
        for point in grid:
            for row in time_point(plan, point, systems, paces):
                result.rows.append(row | _facts(plan, systems[row["system"]], result.checks))
                _print_row(console, row)
    return result


def _facts(plan: DecodePlan, system: System, checks: list[TokenAgreement]) -> Row:
    """Facts for every row."""
    passed = [check.passed for check in checks if check.system == system.name]
    return {
        **plan.facts(),
        "fill": plan.fill,
        "verified": all(passed) if passed else None,
        **system.facts(),
    }


def _print_row(console: Console, row: Row) -> None:
    where = f"prompt {row['prompt']:,}" if "prompt" in row else f"{row['context']:>7,} x {row['batch']:<3}"
    place = f"{where} {row['system']:24}"
    if row["tokens_per_s"] is None:
        console.print(f"{place} skipped: {row['skipped']}", style="yellow")
    else:
        console.print(f"{place} {row['tokens_per_s']:10,.1f} tokens/s  spread {row['spread']:.2f}")


@dataclass(slots=True)
class Pace:
    """The cost of one system's steps so far: the fewest seconds per cached token."""

    per_token: float = 0.0

    def note(self, point: Point, step_s: float) -> None:
        here = step_s / (point.context * point.batch)
        self.per_token = here if not self.per_token else min(self.per_token, here)

    def forecast(self, point: Point) -> float:
        """Seconds of a step at another point, with the best cost per cached token so far."""
        return self.per_token * point.context * point.batch


def time_point(
    plan: DecodePlan, point: Point, systems: dict[str, System], paces: dict[str, Pace]
) -> list[Row]:
    """Time a point. Returns: one row for each system, including skipped ones."""
    rows: dict[str, Row] = {}
    waiting = list(systems)
    while waiting:
        group, reason = _fitting(point, [systems[name] for name in waiting])
        if not group:
            name = waiting.pop(0)
            rows[name] = _skipped(name, point, reason)
            continue
        rows |= _time_group(plan, point, {name: systems[name] for name in group}, paces)
        waiting = [name for name in waiting if name not in group]
    return [rows[name] for name in systems]


def _fitting(point: Point, systems: list[System]) -> tuple[list[str], str]:
    """Return the first systems that can be open at once, or the reason why the first one cannot."""
    free = int(free_host_memory_bytes() * MEMORY_SHARE)
    group: list[str] = []
    for system in systems:
        needed = system.new_bytes(point)
        if needed > free:
            return group, f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB may be used"
        group.append(system.name)
        free -= needed
    return group, ""


def _time_group(
    plan: DecodePlan, point: Point, systems: dict[str, System], paces: dict[str, Pace]
) -> dict[str, Row]:
    """Open all, warm up, alternate, close all."""
    rows: dict[str, Row] = {}
    sessions: dict[str, Session] = {}
    steps: dict[str, int] = {}
    with ExitStack() as stack:
        for name, system in systems.items():
            try:
                _check_limit(plan, paces[name].forecast(point), system.multiple)
                session = sessions[name] = stack.enter_context(closing(system.open(point)))
                steps[name] = _warm_up(plan, point, system, session, paces[name])
            except SkipPoint as reason:
                rows[name] = _skipped(name, point, str(reason))
        runs = {name: partial(speed_of, sessions[name], steps[name]) for name in steps}
        speeds = alternate(runs, plan.rounds) if runs else {}
        for name, values in speeds.items():
            rows[name] = row_of(name, point, values, steps[name], sessions[name])
    return rows


def speed_of(session: Session, steps: int) -> float:
    """Tokens/s of one slice."""
    time.sleep(PAUSE_S)
    return session.run(steps).tokens_per_s


def _warm_up(plan: DecodePlan, point: Point, system: System, session: Session, pace: Pace) -> int:
    """Run slices that do not count; repeated if other processes may have disturbed them.

    Returns: steps of the slices that count.
    """
    step_s = float("inf")
    for _ in range(WARM_UPS):
        warm_up = session.run(2)
        step_s = min(step_s, warm_up.elapsed_s / warm_up.steps)
        if _total_s(plan, step_s, system.multiple) <= plan.limit_s / 4:
            break
    _check_limit(plan, step_s, system.multiple)
    if system.multiple == 1 and step_s < 0.1:
        step_s = min(step_s, session.run(8).elapsed_s / 8)
    pace.note(point, step_s)
    if system.multiple > 1:
        return system.multiple
    return max(2, min(plan.steps, int(plan.slice_s / step_s)))


def _total_s(plan: DecodePlan, step_s: float, steps: int) -> float:
    """Seconds of all rounds with the fewest steps allowed."""
    return step_s * max(2, steps) * plan.rounds


def _check_limit(plan: DecodePlan, step_s: float, steps: int) -> None:
    """Raises: SkipPoint if the rounds would exceed the limit."""
    total_s = _total_s(plan, step_s, steps)
    if total_s > plan.limit_s:
        raise SkipPoint(
            f"a step takes about {step_s:.1f} s; {total_s:.0f} s exceed the limit of {plan.limit_s:.0f} s"
        )


def row_of(name: str, point: Point, values: list[float], steps: int, session: Session) -> Row:
    """values: tokens/s of each slice."""
    speed = median(values)
    return {
        "system": name,
        "context": point.context,
        "batch": point.batch,
        "tokens_per_s": speed,
        "ms_per_step": 1e3 * point.batch / speed,
        "rounds": len(values),
        "steps": steps,
        "spread": spread(values),
        "fill_s": session.fill_s,
    }


def _skipped(name: str, point: Point, reason: str) -> Row:
    return {
        "system": name,
        "context": point.context,
        "batch": point.batch,
        "tokens_per_s": None,
        "skipped": reason,
    }
