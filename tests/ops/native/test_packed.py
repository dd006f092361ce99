"""Packed weights: as numbers, in exact products and in products of integers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from random_rows import KINDS, random_rows
from torch import Tensor

from kvreclaim.ops import native
from kvreclaim.ops.native.decoder import Norm, Projection, rms_norm
from kvreclaim.ops.native.packed import ACTIVATIONS, packed_linear, unpack_rows
from kvreclaim.ops.packed import PackedMatrix
from kvreclaim.weights.packed import CodeRule, PackedRows

ROWS = (1, 2, 3, 5, 8, 9, 21)


@pytest.fixture(params=native.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this CPU: each multiplies bytes in a way of its own."""
    native.force_isa(request.param)
    yield request.param
    native.force_isa(native.supported_isas()[0])


def numbers_of(matrix: PackedMatrix) -> Tensor:
    return unpack_rows(matrix, torch.arange(matrix.out_features), torch.float32)


def random_x(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype)


STEPS = {"int8": 127, "int16": 127 * 128}
FEW = 64
"""Rows up to which every CPU multiplies integers; above, AMX multiplies parts of bf16."""
PARTS = {"int8": 2**-8, "int16": 2**-16, "exact": 2**-19}


def rounded(x: Tensor, activations: str) -> Tensor:
    """x rounded as the kernel rounds it, in fp64: so many steps to the largest of 32 columns."""
    steps = STEPS[activations]
    chunks = x.float().unflatten(1, (-1, 32))
    largest = chunks.abs().amax(-1, keepdim=True)
    inverse = torch.tensor(1.0 * steps) / largest
    return ((chunks * inverse).round().double() * (largest.double() / steps)).flatten(1)


@pytest.mark.parametrize("out", [16, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_come_back(isa: str, kind: str, out: int) -> None:
    rows = random_rows(kind, out, 512)
    matrix = PackedMatrix([rows], out)
    assert torch.equal(numbers_of(matrix), rows.dequantised())
    ids = torch.tensor([out - 1, 0, 7, 7])
    assert torch.equal(unpack_rows(matrix, ids, torch.bfloat16), rows.dequantised()[ids].bfloat16())


def test_pieces_make_the_whole() -> None:
    rows = random_rows("q4_k", 50, 256)
    pieces = [rows.select(torch.arange(first, min(first + 16, 50))) for first in range(0, 50, 16)]
    assert torch.equal(numbers_of(PackedMatrix(iter(pieces), 50)), rows.dequantised())
    for wrong in (pieces[:-1], [pieces[-1], *pieces[:-1]]):
        with pytest.raises(ValueError, match="packed matrix"):
            PackedMatrix(wrong, 50)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_products(isa: str, kind: str) -> None:
    rows = random_rows(kind, 72, 512)
    matrix, weight = PackedMatrix([rows], 72), rows.dequantised().double()
    for count in ROWS:
        x = random_x(count, 512)
        want = x.double() @ weight.T
        got = packed_linear(x, [matrix], activations="exact")
        bound = 2e-6 * float((x.abs().double() @ weight.abs().T).max())
        torch.testing.assert_close(got.double(), want, rtol=0, atol=bound)


@pytest.mark.parametrize("activations", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_integers(isa: str, kind: str, activations: str) -> None:
    """Equal to products of the rounded x: nothing else is lost but of tables, which are rounded alike."""
    rows = random_rows(kind, 72, 512)
    matrix = PackedMatrix([rows], 72)
    weight = rows.dequantised().double()
    if rows.table is not None:
        unit = matrix.native.unit if activations == "int8" else matrix.native.fine_unit
        assert STEPS[activations] / 2 <= float(rows.table.abs().max()) / unit <= STEPS[activations] * 1.00001
        table = (rows.table.double() / unit).round() * unit
        weight = table[rows.codes.long()] * rows.scales.double().repeat_interleave(64, 1)
    for count in ROWS:
        x = random_x(count, 512)
        bound = 2e-6 * float((x.abs().double() @ weight.abs().T).max())
        got = packed_linear(x, [matrix], activations=activations).double()
        torch.testing.assert_close(got, rounded(x, activations) @ weight.T, rtol=0, atol=bound)


@pytest.mark.parametrize("activations", STEPS)
def test_every_cpu_rounds_alike(isa: str, activations: str) -> None:
    """Integers are the same: ties too, which a fused multiply and add would round in another way."""
    codes = torch.eye(32, dtype=torch.uint8)
    ones, none = torch.ones(32, 1), torch.zeros(32, 1, dtype=torch.uint8)
    matrix = PackedMatrix([PackedRows(codes, 4, CodeRule.ZERO, 32, ones, none)], 32)
    x = random_x(1920, 32)
    step = x.abs().amax(1, keepdim=True) / STEPS[activations]
    got = torch.cat([packed_linear(some, [matrix], activations=activations) for some in x.split(FEW)])
    assert float(((got - rounded(x, activations)) / step).abs().max()) < 0.01


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(isa: str, kind: str, activations: str) -> None:
    matrix, x = PackedMatrix([random_rows(kind, 200, 256)], 200), random_x(21, 256, torch.bfloat16)
    together = packed_linear(x, [matrix], activations=activations)
    for count in (1, 2, 3, 5, 9):
        for first in (0, 21 - count):
            alone = packed_linear(x[first : first + count], [matrix], activations=activations)
            assert torch.equal(alone, together[first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_of_a_prompt(isa: str, kind: str, activations: str, dtype: torch.dtype) -> None:
    """Near to exact products, and again the same for a row in any company of more than FEW."""
    rows = random_rows(kind, 150, 512)
    matrix, weight = PackedMatrix([rows], 150), rows.dequantised().double()
    x = random_x(530, 512, dtype)
    got = packed_linear(x.float(), [matrix], activations=activations).double()
    sizes = x.double().abs() @ weight.abs().T
    steps = x.double().unflatten(1, (-1, 32)).abs().amax(-1) @ weight.unflatten(1, (-1, 32)).abs().sum(-1).T
    lost = (0 if activations == "exact" else 1 / STEPS[activations]) * steps + PARTS[activations] * sizes
    assert bool(((got - x.double() @ weight.T).abs() <= lost).all())
    own = packed_linear(x, [matrix], activations=activations)
    torch.testing.assert_close(own.double(), got, rtol=2**-8, atol=float(lost.max()))
    for first, end in ((0, FEW + 1), (400, 530), (1, 514)):
        assert torch.equal(packed_linear(x[first:end], [matrix], activations=activations), own[first:end])


def test_one_product_by_hand() -> None:
    """x = 1.27, -.5, .3, 0 and w = (3, 15, 0, 8), z = 8, s = .1: acc -369, sum of q 107, y = -1.225."""
    codes = torch.full((1, 32), 8, dtype=torch.uint8)
    codes[0, :4] = torch.tensor([3, 15, 0, 8])
    zeros, scales = torch.full((1, 1), 8, dtype=torch.uint8), torch.tensor([[0.1]])
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([1.27, -0.5, 0.3, 0.0])
    matrix = PackedMatrix([PackedRows(codes, 4, CodeRule.ZERO, 32, scales, zeros)], 1)
    for activations in ACTIVATIONS:
        assert packed_linear(x, [matrix], activations=activations).item() == pytest.approx(-1.225, abs=1e-6)


@pytest.mark.parametrize("group", [32, 128, 512])
def test_groups_of_any_size(isa: str, group: int) -> None:
    rows = random_rows("zero", 33, 1024, group)
    matrix, x = PackedMatrix([rows], 33), random_x(3, 1024)
    assert torch.equal(numbers_of(matrix), rows.dequantised())
    want = rounded(x, "int16") @ rows.dequantised().double().T
    torch.testing.assert_close(packed_linear(x, [matrix]).double(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_side_by_side_with_norm_bias_and_sum(isa: str, dtype: torch.dtype) -> None:
    """One layer's projection: a norm before the product, a sum behind it, rounded where modules round."""
    kinds = [("q4_k", 64), ("q6_k", 40), ("zero", 48)]
    matrices = [PackedMatrix([random_rows(kind, out, 256)], out) for kind, out in kinds]
    x, bias, residual = (random_x(n, m, dtype, n) for n, m in ((5, 256), (1, 152), (5, 152)))
    norm = Norm(random_x(1, 256, dtype, 9)[0], 1e-5)
    want = [packed_linear(rms_norm(x, norm.weight, norm.eps), [each]) for each in matrices]
    projection = Projection(matrices, norm=norm, like=x)
    assert torch.equal(projection(x), torch.cat(want, 1))
    assert torch.equal(projection(x, residual), residual + torch.cat(want, 1))
    with_bias = packed_linear(x.float(), matrices, bias[0].float()).to(dtype)
    assert torch.equal(packed_linear(x, matrices, bias[0]), with_bias)


def test_numbers_that_are_not_finite_show(isa: str) -> None:
    matrix = PackedMatrix([random_rows("scale", 16, 64)], 16)
    for bad in (float("nan"), float("inf")):
        x = random_x(2, 64)
        x[1, 40] = bad
        y = packed_linear(x, [matrix])
        assert bool(y[0].isfinite().all())
        assert not bool(y[1].isfinite().any())
