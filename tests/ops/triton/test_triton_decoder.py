"""What lies between the products of a decoder layer, against its formulas in fp64; rows are independent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.glm4.modeling_glm4 import rotate_half as rotate_neighbours
from transformers.models.llama.modeling_llama import rotate_half
from triton_pair import DEVICE, DTYPES, random

from kvreclaim.ops.layer_parts import Gate, Heads, Norm
from kvreclaim.ops.triton.decoder import Projection, add_rms_norm, gate, rms_norm, rotate

EPS = 1e-6
SIZES = [(1, 64), (5, 80), (33, 96), (3, 1000), (2, 3, 4100)]


def close(got: Tensor, exact: Tensor, steps: float = 1.0) -> None:
    """Within so many roundings of the dtype, and of fp32 sums whose terms cancel."""
    eps = torch.finfo(got.dtype).eps * steps
    torch.testing.assert_close(got.double(), exact, rtol=max(eps, 3e-6), atol=max(eps / 8, 1e-6))


def norm_of(x: Tensor, weight: Tensor, from_one: bool = False) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (weight.double() + from_one)


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_norms(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    x, weight = random(1, *size, dtype=dtype, scale=1e-2), random(2, size[-1], dtype=dtype)
    close(rms_norm(x, weight, EPS), norm_of(x, weight))
    close(rms_norm(x, weight, EPS, from_one=True), norm_of(x, weight.double() + 1))
    wide = random(3, *size[:-1], 2 * size[-1], dtype=dtype)
    close(rms_norm(wide[..., 1 : size[-1] + 1], weight, EPS), norm_of(wide[..., 1 : size[-1] + 1], weight))


@DTYPES
@pytest.mark.parametrize("size", [size for size in SIZES if len(size) == 2])
def test_sums_and_their_norms(dtype: torch.dtype, size: tuple[int, int]) -> None:
    """The sum to the bit, its norm that of the sum; both inputs stay."""
    x, residual = (random(seed, *size, dtype=dtype) for seed in (1, 2))
    weight, before = random(3, size[1], dtype=dtype), (x.clone(), residual.clone())
    total, normed = add_rms_norm(x, residual, Norm(weight, EPS))
    assert torch.equal(total, x + residual)
    close(normed, norm_of(x.double() + residual.double(), weight), steps=2)
    wide = torch.empty_like(x, dtype=torch.float32)
    assert torch.equal(add_rms_norm(x, residual, Norm(weight, EPS), wide=wide)[1], normed)
    assert torch.equal(wide.to(dtype), normed)
    assert DEVICE.type == "cpu" or torch.equal(wide, normed.float())
    for from_one in (False, True):
        after, norm = (Norm(each, EPS, from_one) for each in (weight.flip(0), weight))
        exact = residual.double() + norm_of(x, after.weight, from_one)
        total, normed = add_rms_norm(x, residual, norm, after)
        close(total, exact)
        close(normed, norm_of(total, weight, from_one), steps=2)
        assert torch.equal(add_rms_norm(x, residual, None, after)[1], total)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def rotated(rows: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> Tensor:
    """[T, H + 2 K, D] fp64 of rows [T, (H + 2 K) D]."""
    rows = rows.double().view(len(rows), -1, heads.dim)
    q, k, v = rows.split([heads.count, heads.kv_count, heads.kv_count], 1)
    if heads.q_norm is not None and heads.k_norm is not None:
        pairs = zip((q, k), (heads.q_norm, heads.k_norm), strict=True)
        q, k = (norm_of(x.reshape(-1, len(n.weight)), n.weight, n.from_one).view_as(x) for x, n in pairs)
    x, turned = torch.cat([q, k], 1), cos.shape[1]
    c, s = cos.double()[:, None], sin.double()[:, None]
    if heads.turns_neighbours:
        c, s = (each[..., : turned // 2].repeat_interleave(2, -1) for each in (c, s))
    turn = rotate_neighbours if heads.turns_neighbours else rotate_half
    low = x[..., :turned] * c + turn(x[..., :turned]) * s
    return torch.cat([torch.cat([low, x[..., turned:]], -1), v], 1)


@DTYPES
@pytest.mark.parametrize(
    ("norms", "neighbours"),
    [("", False), ("", True), ("heads", False), ("heads from one", True), ("rows", False)],
)
@pytest.mark.parametrize(
    ("count", "shape", "turned"),
    [
        (1, (4, 2, 64), 64),
        (7, (3, 1, 80), 80),
        (5, (2, 2, 96), 48),
        (33, (5, 1, 128), 32),
        (2, (4, 4, 256), 256),
    ],
)
def test_rotations(
    dtype: torch.dtype,
    norms: str,
    neighbours: bool,
    count: int,
    shape: tuple[int, int, int],
    turned: int,
) -> None:
    """Whole heads and parts of them, with and without norms of each head or of all; values stay."""
    head_count, kv_heads, dim = shape
    widths = [dim, dim] if norms != "rows" else [head_count * dim, kv_heads * dim]
    weights = [random(seed, width, dtype=dtype) for seed, width in enumerate(widths, 1) if norms]
    own = [Norm(weight, EPS, norms == "heads from one") for weight in weights]
    heads = Heads(head_count, kv_heads, dim, *(own or (None, None)), neighbours)
    rows = random(3, count, (head_count + 2 * kv_heads) * dim, dtype=dtype)
    angles = (random(seed, count, turned // 2, dtype=dtype).clamp(-1, 1) for seed in (4, 5))
    cos, sin = (each.repeat(1, 2) for each in angles)
    exact, values = rotated(rows, cos, sin, heads), rows[:, -kv_heads * dim :].clone()
    got = rotate(rows, cos, sin, heads)
    close(got.view(exact.shape), exact, steps=2)
    assert torch.equal(got[:, -kv_heads * dim :], values)
    assert dtype != torch.float32 or got.data_ptr() == rows.data_ptr()


@DTYPES
@pytest.mark.parametrize(("count", "width"), [(1, 96), (5, 1000), (67, 40), (2, 2100)])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gates(dtype: torch.dtype, count: int, width: int, kind: Gate) -> None:
    x = random(1, count, 2 * width, dtype=dtype, scale=30.0)
    x[0, :4] = torch.tensor([-1000.0, 1000.0, 0.0, -87.5])
    half, up = x[:, :width].double(), x[:, width:].double()
    exact = functional.silu(half) if kind == "silu" else functional.gelu(half, approximate="tanh")
    close(gate(x, kind), exact * up)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_added_to_a_residual(dtype: torch.dtype, has_bias: bool) -> None:
    x, residual = random(1, 5, 48, dtype=dtype), random(2, 5, 24, dtype=dtype)
    weight = random(3, 24, 48, dtype=dtype)
    bias = random(4, 24, dtype=dtype) if has_bias else None
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    total = residual.clone()
    found = Projection(weight, bias).add_to(total, x)
    assert found.data_ptr() == total.data_ptr()
    largest = float(exact.abs().max())
    off = float((found.double() - exact - residual.double()).abs().max())
    assert off <= max(torch.finfo(dtype).eps, 1e-6) * largest


@DTYPES
def test_rows_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    weight = random(1, 128, dtype=dtype)
    heads = Heads(4, 2, 32, Norm(weight[:32], EPS), Norm(weight[32:64], EPS))
    x, angles = random(2, 37, 256, dtype=dtype), random(3, 37, 32, dtype=dtype)

    def run(some: slice) -> list[Any]:
        rows, turn = x[some], angles[some]
        sums = add_rms_norm(rows[:, :128].contiguous(), rows[:, 128:].contiguous(), Norm(weight, EPS))
        return [
            rms_norm(rows[:, :128], weight, EPS),
            *sums,
            rotate(rows.clone(), turn, turn.flip(1), heads),
            gate(rows),
        ]

    together = run(slice(0, 37))
    for i in (0, 5, 36):
        for alone, row in zip(run(slice(i, i + 1)), together, strict=True):
            assert torch.equal(alone[0], row[i])
