"""Whether decode speed under compression depends on how long the trace has grown."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from statistics import median

from rich.table import Table

from kvreclaim.bench.common import Row, alternate, sheet, spread
from kvreclaim.bench.plans import DecodePlan
from kvreclaim.bench.systems.base import Point
from kvreclaim.bench.systems.ours import Ours

SYSTEM = "kvreclaim-triattention"


def run(plan: DecodePlan, contexts: Sequence[int] = (8192, 65_536), batch: int = 8) -> list[Row]:
    """Decode at each logical length, the lengths taking turns; every slice holds one compression a sequence.

    Returns: rows as of `bench decode`, with `ratio` to the speed at the first length.
    """
    new_tokens = (plan.rounds + 1) * plan.interval + 8
    with ExitStack() as stack:
        sessions = {}
        for context in contexts:
            point = Point(context, batch, new_tokens, plan.fill)
            system = Ours(SYSTEM, plan.setup, [point], config=plan.compression(SYSTEM), kernels=plan.kernels)
            sessions[context] = stack.enter_context(closing(system.open(point)))
            sessions[context].run(plan.interval)
        runs = {context: partial(session.run, plan.interval) for context, session in sessions.items()}
        slices = alternate(runs, plan.rounds)
    speeds = {context: [each.tokens_per_s for each in some] for context, some in slices.items()}
    first = median(speeds[contexts[0]])
    return [
        {
            "system": SYSTEM,
            **plan.facts(),
            "context": context,
            "batch": batch,
            "tokens_per_s": median(speeds[context]),
            "spread": spread(speeds[context]),
            "ratio": median(speeds[context]) / first,
            "budget": plan.budget,
            "interval": plan.interval,
        }
        for context in contexts
    ]


def growth_table(rows: Sequence[Row]) -> Table:
    """For people."""
    columns = {
        "length x batch": "{context:,} x {batch}",
        "tokens/s": "{tokens_per_s:,.1f}",
        "spread": "{spread:.2f}",
        "of the first": "{ratio:.1%}",
    }
    return sheet("triattention as the trace grows", columns, rows)
