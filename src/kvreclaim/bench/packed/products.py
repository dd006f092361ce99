"""Products with one packed matrix beside the same with bf16: bytes that must move over the time they take."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from kvreclaim.bench.bandwidth import MachineSpeed, measure, timed
from kvreclaim.bench.common import Row, alternate, sheet
from kvreclaim.bench.packed.plan import ACTIVATIONS, FORMATS, PackedPlan
from kvreclaim.ops.extension import native
from kvreclaim.ops.native.linear import linear, max_rows
from kvreclaim.ops.native.packed import packed_linear
from kvreclaim.ops.packed import PackedMatrix
from kvreclaim.weights.random_rows import random_rows

COLD_BYTES = 160 << 20
"""So many bytes of weights are gone through in turn, so that no cache holds them."""
SLICE_S = 0.05
LOST = {"int8": 2e-2, "int16": 2e-4}
"""Most by which a product may differ from the exact one, of the largest: many times what rounding does."""
Product = Callable[[int], Tensor]


def run(plan: PackedPlan) -> tuple[list[Row], MachineSpeed]:
    """A row per number of rows, format and activations. Raises: AssertionError for a wrong product."""
    check(plan)
    before, rows = measure(), []
    for count in plan.rows:
        x = torch.randn(count, plan.size, generator=torch.Generator().manual_seed(1)).bfloat16()
        ways: dict[tuple[str, str], tuple[Product, int, int]] = {("bf16", "-"): _plain(plan.size, x)}
        for name in FORMATS:
            matrices = _copies(plan.size, name)
            for activations in ACTIVATIONS:
                ways[name, activations] = _packed(matrices, x, activations)
        found = alternate({way: _slice(*product) for way, product in ways.items()}, plan.rounds)
        base = median(found["bf16", "-"])
        for (name, activations), times in found.items():
            call_s, nbytes = median(times), ways[name, activations][2]
            rows.append(
                {
                    "isa": native().isa(),
                    "threads": plan.threads,
                    "size": plan.size,
                    "rows": count,
                    "format": name,
                    "activations": activations,
                    "us": call_s * 1e6,
                    "mib": nbytes / 2**20,
                    "gb_s": nbytes / call_s / 1e9,
                    "times_bf16": base / call_s,
                }
            )
    best = before.better(measure())
    return [row | {"read_share": row["gb_s"] / best.read_gb_s} for row in rows], best


def check(plan: PackedPlan) -> None:
    """Products of rounded activations are those of the exact ones, but for the rounding."""
    x = torch.randn(5, plan.size, generator=torch.Generator().manual_seed(2))
    for name, (kind, group) in FORMATS.items():
        rows = random_rows(kind, 128, plan.size, group)
        matrix, want = PackedMatrix([rows], 128), x.double() @ rows.dequantised().double().T
        for activations in ("exact", *ACTIVATIONS):
            got = packed_linear(x, [matrix], activations=activations)
            error = float((got - want).abs().max() / want.abs().max())
            assert error <= LOST.get(activations, 1e-5), f"{name}, {activations}: off by {error:.1e}"


def _plain(size: int, x: Tensor) -> tuple[Product, int, int]:
    count = _count(2 * size * size)
    weights = [torch.randn(size, size).bfloat16() for _ in range(count)]
    multiply = linear if x.shape[0] <= max_rows(x.dtype) else functional.linear
    return (lambda i: multiply(x, weights[i])), count, weights[0].nbytes


def _copies(size: int, name: str) -> list[PackedMatrix]:
    kind, group = FORMATS[name]
    rows = random_rows(kind, size, size, group)
    first = PackedMatrix([rows], size)
    return [first, *(PackedMatrix([rows], size) for _ in range(_count(first.num_bytes) - 1))]


def _packed(matrices: list[PackedMatrix], x: Tensor, activations: str) -> tuple[Product, int, int]:
    def product(i: int) -> Tensor:
        return packed_linear(x, [matrices[i]], activations=activations)

    return product, len(matrices), matrices[0].num_bytes


def _count(nbytes: int) -> int:
    return -(-COLD_BYTES // nbytes)


def _slice(product: Product, count: int, nbytes: int) -> Callable[[], float]:
    """Seconds of one product, from rounds through all matrices."""

    def through(times: int) -> None:
        for _ in range(times):
            for i in range(count):
                product(i)

    through(1)
    times = max(1, int(SLICE_S / timed(lambda: through(1), "cpu")))
    return lambda: timed(lambda: through(times), "cpu") / times / count


def products_table(rows: list[Row], machine: MachineSpeed) -> Table:
    columns = {
        "format": "{format}",
        "activations": "{activations}",
        "rows": "{rows}",
        "µs": "{us:,.0f}",
        "MiB": "{mib:,.1f}",
        "GB/s": "{gb_s:,.1f}",
        "of read": "{read_share:.0%}",
        "x bf16": "{times_bf16:.2f}",
    }
    size, isa = rows[0]["size"], rows[0]["isa"]
    title = f"products, {size} x {size}, {isa}; read {machine.read_gb_s:.1f} GB/s"
    return sheet(title, columns, rows, text_columns=2)
