"""Whether decode speed under compression depends on how long the trace has grown."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial

from rich.table import Table

from kvreclaim.bench.common import Row, alternate, sheet
from kvreclaim.bench.decode import row_of, speed_of
from kvreclaim.bench.plans import DecodePlan
from kvreclaim.bench.systems.base import Point
from kvreclaim.bench.systems.ours import KvreclaimSystem

SYSTEM = "kvreclaim-triattention"


def run(plan: DecodePlan, contexts: Sequence[int] = (8192, 65_536), batch: int = 8) -> list[Row]:
    """Decode at each logical length, the lengths taking turns; every slice holds one compression a sequence.

    Returns: rows as of `bench decode`, with `ratio` to the speed at the first length.
    """
    new_tokens = (plan.rounds + 1) * plan.interval + 8
    with ExitStack() as stack:
        sessions = {}
        for point in (Point(context, batch, new_tokens, plan.fill) for context in contexts):
            system = KvreclaimSystem(
                SYSTEM, plan.setup, [point], config=plan.compression(SYSTEM), kernels=plan.kernels
            )
            sessions[point] = stack.enter_context(closing(system.open(point)))
            sessions[point].run(plan.interval)
        runs = {point: partial(speed_of, session, plan.interval) for point, session in sessions.items()}
        speeds = alternate(runs, plan.rounds)
    rows = [row_of(SYSTEM, point, speeds[point], plan.interval, sessions[point]) for point in sessions]
    facts = {**plan.facts(), "budget": plan.budget, "interval": plan.interval}
    return [facts | row | {"ratio": row["tokens_per_s"] / rows[0]["tokens_per_s"]} for row in rows]


def growth_table(rows: Sequence[Row]) -> Table:
    """For people."""
    columns = {
        "length x batch": "{context:,} x {batch}",
        "tokens/s": "{tokens_per_s:,.1f}",
        "spread": "{spread:.2f}",
        "of the first": "{ratio:.1%}",
    }
    return sheet("triattention as the trace grows", columns, rows)
