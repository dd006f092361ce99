"""The host's part of decode steps, and the cost of compression.

python -m benchmarks step --systems "full,ada_kv(knorm)" --contexts 4096 --batches 32,64
python -m benchmarks compress --model bench_models/qwen3-0.6b --contexts 8192 --budgets 2048
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Annotated, Any

from benchmarks.runner import command
from kvreclaim.bench import host_steps
from kvreclaim.bench.common import Row, sheet, wide_console
from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.host_steps import PartTimer, timers
from kvreclaim.bench.systems.base import Point
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.cli.bench import SHARED, decode_plan
from kvreclaim.cli.bench_options import Json, publish, ready
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.compression import compressor as compressor_module
from kvreclaim.compression import uneven as uneven_module
from kvreclaim.options import check_options, option


@command
def step(
    plan: Annotated[
        DecodePlan,
        ConfigOptions(
            config=DecodePlan,
            only=("systems", "contexts", "batches", "steps", "budget", "interval", *SHARED),
            defaults={"systems": ("full", "triattention"), "contexts": (1024, 16384), "batches": (1, 8)},
            build=decode_plan,
        ),
    ],
    json_file: Json = None,
) -> None:
    """The host's part of a decode step, by phase, with forward passes that compute nothing."""
    with ready(plan.threads):
        rows = host_steps.run(plan)
        publish(rows, [host_steps.host_table(rows)], json_file)


@dataclass(frozen=True, slots=True)
class CompressPlan:
    """Every context at the base's budget, then every budget at `budget_context`; by policy and batch."""

    base: DecodePlan
    policies: tuple[str, ...] = option(("triattention", "query_mixture"), "Policies, comma-separated.")
    contexts: tuple[int, ...] = option((8192, 32_768, 131_072), "Tokens in the cache, at --budget.")
    budgets: tuple[int, ...] = option((512, 2048, 8192), "Budgets in tokens, at --budget-context.")
    batches: tuple[int, ...] = option((1,), "Sequences that are compressed together.")
    budget_context: int = option(32_768, "Tokens in the cache for --budgets.", low=1)
    intervals: int = 2

    def __post_init__(self) -> None:
        check_options(self)

    def points(self) -> Iterator[tuple[int, int, int]]:
        """(context, batch, budget), none twice, none with a context within its budget."""
        wanted = [(c, b, self.base.budget) for b in self.batches for c in self.contexts]
        wanted += [(self.budget_context, b, budget) for b in self.batches for budget in self.budgets]
        for context, batch, budget in dict.fromkeys(wanted):
            if context > budget + self.base.interval:
                yield context, batch, budget


def compression_cost(base: DecodePlan, policy: str, context: int, batch: int, intervals: int) -> Row:
    """Fill the cache to the context under the policy, then decode whole intervals.

    Returns: step_ms, the median of the steps without a pass; score_ms, select_ms, move_ms and pass_ms of one
        sequence, means over the passes; share, the time of one pass for every sequence over that of the
        interval's steps. A pass reads budget + interval tokens, however long the trace is.
    """
    steps = intervals * base.interval
    point = Point(context, batch, steps + 16, "synthetic")
    config = base.policy(policy)
    system = KvreclaimSystem(f"kvreclaim-{policy}", base.setup, [point], config=config, kernels=base.kernels)
    clock, totals = PartTimer(), system.llm.engine.totals
    with closing(system.open(point)) as session:
        session.run(4)
        before = (totals.compactions, totals.score_s, totals.compact_s)
        quiet = []
        choosing = [(compressor_module, "select_each", "select"), (uneven_module, "select_heads", "select")]
        with timers(clock, choosing):
            for _ in range(steps):
                passes, started = totals.compactions, perf_counter()
                session.run(1)
                if totals.compactions == passes:
                    quiet.append(perf_counter() - started)
    passes = totals.compactions - before[0]
    assert passes > 0, f"no pass in {steps} steps"
    select = clock.take().get("select", 0.0) / passes
    score = (totals.score_s - before[1]) / passes - select
    move, step = (totals.compact_s - before[2]) / passes, median(quiet)
    return {
        "policy": policy,
        **base.facts(),
        "context": context,
        "batch": batch,
        "budget": base.budget,
        "interval": base.interval,
        "passes": passes,
        "step_ms": 1e3 * step,
        "score_ms": 1e3 * score,
        "select_ms": 1e3 * select,
        "move_ms": 1e3 * move,
        "pass_ms": 1e3 * (score + select + move),
        "share": batch * (score + select + move) / (base.interval * step),
        "kernels": system.llm.engine.kernels,
    }


@command
def compress(
    base: Annotated[DecodePlan, ConfigOptions(config=DecodePlan, only=(*SHARED, "budget", "interval"))],
    grid: Annotated[dict[str, Any], ConfigOptions(config=CompressPlan, build=dict)],
    json_file: Json = None,
) -> None:
    """Cost of one compaction pass (score, select, move) and its share of decoding."""
    plan, rows, console = CompressPlan(base, **grid), [], wide_console(stderr=True)
    with ready(base.threads):
        for policy in plan.policies:
            for context, batch, budget in plan.points():
                point = replace(base, budget=budget)
                row = compression_cost(point, policy, context, batch, plan.intervals)
                place = f"{policy} {context:,} x {batch}, budget {budget}"
                console.print(f"{place}: {row['pass_ms']:.2f} ms, {row['share']:.1%}", style="dim")
                rows.append(row)
        columns = {
            "policy": "{policy}",
            "context x batch": "{context:,} x {batch}",
            "budget": "{budget:,}",
            "step ms": "{step_ms:,.2f}",
            "score": "{score_ms:,.2f}",
            "select": "{select_ms:,.2f}",
            "move": "{move_ms:,.2f}",
            "pass ms": "{pass_ms:,.2f}",
            "share": "{share:.2%}",
        }
        made = sheet("one compaction pass of one sequence, ms", columns, rows, text_columns=2)
        publish(rows, [made], json_file)
