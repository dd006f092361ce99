"""What passes of several sequences that are due together cost, beside that of one: interleaved, in one run.

Sequences are filled to budget + interval and held there; then their passes are timed, as the engine runs them
at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

from rich.table import Table

from kvreclaim.bench.common import Row, table, text
from kvreclaim.bench.plans import DecodePlan
from kvreclaim.bench.systems.base import Fill, Point
from kvreclaim.bench.systems.ours import Ours
from kvreclaim.compression import CompressionConfig, Signal, make_policy

OBSERVED = {Signal.RECENT_QUERIES, Signal.ATTENTION_MASS}
"""Kept while prompts are computed: a policy that asks for them needs real ones."""


def run(base: DecodePlan, policies: Sequence[str], together: int, rounds: int) -> list[Row]:
    """Returns: rows with policy, budget, interval, sequences; one_ms, together_ms and alone_ms (the same
    sequences one after another), medians over the rounds; ratio of together_ms to one_ms."""
    return [_measure(base, policy, together, rounds) for policy in policies]


def _measure(base: DecodePlan, policy: str, together: int, rounds: int) -> Row:
    fill: Fill = "prefill" if make_policy(policy).needs & OBSERVED else "synthetic"
    point = Point(base.budget + base.interval, together, 2, fill)
    config = CompressionConfig(policy, base.budget, base.interval, recent=min(128, base.budget // 4))
    system = Ours(f"kvreclaim-{policy}", base.setup, [point], config=config, kernels=base.kernels)
    one = Point(point.context, 1, point.new_tokens, point.fill)
    cases = {"one": (one, together), "together": (point, together), "alone": (point, 1)}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (case, at_once) in cases.items():
            times[name].append(_time(system, case, at_once))
    ms = {f"{name}_ms": 1e3 * median(values) for name, values in times.items()}
    return {
        "policy": policy,
        "model": base.model.name,
        "dtype": base.dtype,
        "threads": base.threads,
        "budget": base.budget,
        "interval": base.interval,
        "sequences": together,
        **ms,
        "ratio": ms["together_ms"] / ms["one_ms"],
        "kernels": system.llm.engine.kernels,
    }


def _time(system: Ours, point: Point, at_once: int) -> float:
    """Seconds of the passes of every sequence of the point, so many in one call."""
    engine = system.llm.engine
    answers = engine.answers
    answers.compress = lambda sequences: None  # type: ignore[method-assign]
    try:
        session = system.open(point)
    finally:
        del answers.compress
    try:
        due = [request.sequences[0] for request in session.requests]
        before = engine.totals.compactions
        started = perf_counter()
        for first in range(0, len(due), at_once):
            answers.compress(due[first : first + at_once])
        elapsed_s = perf_counter() - started
        assert engine.totals.compactions == before + len(due), "a pass failed or was postponed"
    finally:
        session.close()
    return elapsed_s


def together_table(rows: Sequence[Row]) -> Table:
    """For people."""
    headings = ("policy", "budget", "one", "together", "one after another", "together / one")
    count = rows[0]["sequences"] if rows else 0
    made = table(f"passes of {count} sequences that are due together, ms", headings, text_columns=1)
    for row in rows:
        parts = (row[f"{part}_ms"] for part in ("one", "together", "alone"))
        made.add_row(row["policy"], f"{row['budget']:,}", *(text(part) for part in parts), text(row["ratio"]))
    return made
