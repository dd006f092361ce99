"""Decode speed of a model and of packed models of its shape, in turns.

python benchmarks/packed.py --model bench_models/qwen3-0.6b --packed bench_models/qwen3-0.6b-awq
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

from rich.table import Table

from kvreclaim.bench.common import Row, alternate, sheet
from kvreclaim.bench.kernels import measure
from kvreclaim.bench.plans import ModelPlan
from kvreclaim.bench.systems.base import Point, SystemSetup
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.checks import require
from kvreclaim.cli.bench_options import Json, publish, ready, script
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.extension import native
from kvreclaim.options import option

WARM_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class PackedPlan(ModelPlan):
    """A model, and packed ones of the same shape."""

    packed: tuple[Path, ...] = option(
        (), "Packed models, comma-separated; `make bench-model` makes two of Qwen3-0.6B's."
    )
    contexts: tuple[int, ...] = option((1024,), "Tokens in each cache, comma-separated.")
    batches: tuple[int, ...] = option((1, 8), "Sequences, comma-separated.")
    steps: int = option(16, "Steps of a timed slice.", low=1)
    rounds: int = option(5, "Timed rounds.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for path in self.packed:
            require(path.exists(), f"--packed names {str(path)!r}, which is missing; run `make bench-model`.")
        positive = min((*self.contexts, *self.batches), default=0) > 0
        require(positive, "--contexts and --batches take positive numbers.")


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


def packed_table(rows: list[Row]) -> Table:
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


@script
def app(plan: Annotated[PackedPlan, ConfigOptions(config=PackedPlan)], json_file: Json = None) -> None:
    """Decode with weights of 4, 6 and 8 bits beside bf16."""
    with ready(plan.threads):
        rows = run(plan)
        publish(rows, [packed_table(rows)], json_file)


if __name__ == "__main__":
    app()
