"""The cost of compression: one pass split into score, select and move, as a share of decoding.

A sequence is compressed once in `interval` tokens. At each point the cache is filled to the context under
the policy, then whole intervals are decoded: `step_ms` is the median of the steps in which nobody was
compressed, `share` the time of one pass for every sequence over that of the interval's steps. A pass reads
what a sequence holds, budget + interval tokens, however long its trace is.

    python benchmarks/compress.py --model bench_models/qwen3-0.6b --contexts 8192 --budgets 2048
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Annotated, Any

from rich.table import Table

from kvreclaim.bench.common import Row, sheet, wide_console
from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.patches import PartTimer, timers
from kvreclaim.bench.systems.base import Point
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.cli.bench import SHARED
from kvreclaim.cli.bench_options import Json, publish, ready, script
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.compression import compressor as compressor_module
from kvreclaim.compression import uneven as uneven_module
from kvreclaim.options import check_options, option


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
        """(context, batch, budget), none twice, none whose context is within its budget."""
        wanted = [(c, b, self.base.budget) for b in self.batches for c in self.contexts]
        wanted += [(self.budget_context, b, budget) for b in self.batches for budget in self.budgets]
        for context, batch, budget in dict.fromkeys(wanted):
            if context > budget + self.base.interval:
                yield context, batch, budget


def run(plan: CompressPlan) -> list[Row]:
    """Returns: rows with policy, context, batch, budget, interval, passes, step_ms; score_ms, select_ms,
    move_ms and pass_ms of one sequence, means over the passes; share."""
    rows, console = [], wide_console(stderr=True)
    for policy in plan.policies:
        for context, batch, budget in plan.points():
            row = _measure(replace(plan.base, budget=budget), policy, context, batch, plan.intervals)
            place = f"{policy} {context:,} x {batch}, budget {budget}"
            console.print(f"{place}: {row['pass_ms']:.2f} ms, {row['share']:.1%}", style="dim")
            rows.append(row)
    return rows


def _measure(base: DecodePlan, policy: str, context: int, batch: int, intervals: int) -> Row:
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


def compress_table(rows: Sequence[Row]) -> Table:
    """For people."""
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
    return sheet("one compaction pass of one sequence, ms", columns, rows, text_columns=2)


@script
def app(
    base: Annotated[DecodePlan, ConfigOptions(config=DecodePlan, only=(*SHARED, "budget", "interval"))],
    grid: Annotated[dict[str, Any], ConfigOptions(config=CompressPlan, build=dict)],
    json_file: Json = None,
) -> None:
    """Cost of one compaction pass (score, select, move) and its share of decoding."""
    with ready(base.threads):
        rows = run(CompressPlan(base, **grid))
        publish(rows, [compress_table(rows)], json_file)


if __name__ == "__main__":
    app()
