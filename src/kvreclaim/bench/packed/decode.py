"""Decode of a model and of packed ones of its shape, in turns."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from statistics import median

from rich.table import Table

from kvreclaim.bench.bandwidth import measure
from kvreclaim.bench.common import Row, alternate, sheet
from kvreclaim.bench.packed.plan import PackedPlan
from kvreclaim.bench.systems.base import Point, SystemSetup
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.extension import native

WARM_STEPS = 4


def run(plan: PackedPlan) -> list[Row]:
    """A row per model and point, the plain model's first; ratios are of the same round, by median."""
    points = [
        Point(context, batch, WARM_STEPS + plan.steps * plan.rounds)
        for context, batch in product(plan.contexts, plan.batches)
    ]
    systems = {
        path.name: KvreclaimSystem("kvreclaim-full", SystemSetup(path, plan.dtype, plan.threads), points)
        for path in (plan.model, *plan.packed)
    }
    before, rows = measure(), []
    for point in points:
        with ExitStack() as opened:
            sessions = {
                name: opened.enter_context(closing(system.open(point))) for name, system in systems.items()
            }
            for session in sessions.values():
                session.run(WARM_STEPS)
            runs = {name: partial(session.run, plan.steps) for name, session in sessions.items()}
            found = alternate(runs, plan.rounds)
        base = found[plan.model.name]
        for name, system in systems.items():
            own, nbytes = found[name], step_bytes(system.llm.loaded)
            rows.append(
                {
                    **plan.facts(),
                    "model": name,
                    "isa": native().isa(),
                    "context": point.context,
                    "batch": point.batch,
                    "weight_mb": nbytes / 1e6,
                    "tokens_per_s": median(each.tokens_per_s for each in own),
                    "weights_gb_s": median(nbytes * each.steps / each.elapsed_s for each in own) / 1e9,
                    "times_bf16": median(b.elapsed_s / o.elapsed_s for b, o in zip(base, own, strict=True)),
                }
            )
    best = before.better(measure())
    return [row | {"read_share": row["weights_gb_s"] / best.read_gb_s} for row in rows]


def step_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that a step reads: all, less embeddings that are not the output layer's too."""
    embeddings, head = loaded.model.get_input_embeddings(), loaded.model.get_output_embeddings()
    own = {each.data_ptr(): each.nbytes for each in (*embeddings.parameters(), *embeddings.buffers())}
    shared = {each.data_ptr() for each in (*head.parameters(), *head.buffers())}
    return loaded.weight_bytes - sum(nbytes for at, nbytes in own.items() if at not in shared)


def decode_table(rows: list[Row]) -> Table:
    columns = {
        "model": "{model}",
        "context x batch": "{context:,} x {batch}",
        "weights, MB": "{weight_mb:,.0f}",
        "tokens/s": "{tokens_per_s:,.1f}",
        "weights, GB/s": "{weights_gb_s:,.1f}",
        "of read": "{read_share:.0%}",
        "x bf16": "{times_bf16:.2f}",
    }
    return sheet(f"decode, {rows[0]['isa']}", columns, rows)
