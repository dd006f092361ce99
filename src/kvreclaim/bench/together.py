"""What passes of several sequences that are due together cost, beside that of one: interleaved, in one run.

Sequences are filled to budget + interval and held there; then their passes are timed, as the engine runs them
at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from unittest.mock import patch

from rich.table import Table

from kvreclaim.bench.common import Row, alternate, sheet
from kvreclaim.bench.plans import CompressPlan
from kvreclaim.bench.systems.base import Fill, Point
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.registry import make_policy

OBSERVED = {Signal.RECENT_QUERIES, Signal.ATTENTION_MASS, Signal.TOKEN_SCORES}
"""Kept while prompts are computed: a policy that asks for them needs real ones."""


def run(plan: CompressPlan) -> list[Row]:
    """Returns: rows with policy, budget, interval, sequences; one_ms, together_ms and alone_ms (the same
    sequences one after another), medians over the rounds; ratio of together_ms to one_ms."""
    return [_measure(plan, policy) for policy in plan.policies if plan.together]


def _measure(plan: CompressPlan, policy: str) -> Row:
    base, together = plan.base, plan.together
    fill: Fill = "prefill" if make_policy(policy).needs & OBSERVED else "synthetic"
    point = Point(base.budget + base.interval, together, 2, fill)
    config = base.policy(policy)
    system = KvreclaimSystem(f"kvreclaim-{policy}", base.setup, [point], config=config, kernels=base.kernels)
    one = replace(point, batch=1)
    cases = {"one": (one, together), "together": (point, together), "alone": (point, 1)}
    times = alternate({name: partial(_time, system, *case) for name, case in cases.items()}, plan.rounds)
    ms = {f"{name}_ms": 1e3 * median(values) for name, values in times.items()}
    return {
        "policy": policy,
        **base.facts(),
        "budget": base.budget,
        "interval": base.interval,
        "sequences": together,
        **ms,
        "ratio": ms["together_ms"] / ms["one_ms"],
        "kernels": system.llm.engine.kernels,
    }


def _time(system: KvreclaimSystem, point: Point, at_once: int) -> float:
    """Seconds of the passes of every sequence of the point, so many in one call."""
    engine = system.llm.engine
    answers = engine.output_processor
    with patch.object(answers, "compress", lambda sequences: None):
        session = system.open(point)
    with closing(session):
        due = [request.sequences[0] for request in session.requests]
        before = engine.totals.compactions
        started = perf_counter()
        for first in range(0, len(due), at_once):
            answers.compress(due[first : first + at_once])
        elapsed_s = perf_counter() - started
        assert engine.totals.compactions == before + len(due), "a pass failed or was postponed"
    return elapsed_s


def together_table(rows: Sequence[Row]) -> Table:
    """For people."""
    count = rows[0]["sequences"] if rows else 0
    columns = {
        "policy": "{policy}",
        "budget": "{budget:,}",
        "one": "{one_ms:,.2f}",
        "together": "{together_ms:,.2f}",
        "one after another": "{alone_ms:,.2f}",
        "together / one": "{ratio:.2f}",
    }
    return sheet(f"passes of {count} sequences that are due together, ms", columns, rows)
