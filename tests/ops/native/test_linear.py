"""Linear layers and norms of ops.native against products in float64."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvreclaim.ops import extension
from kvreclaim.ops.native import decoder as linear_module
from kvreclaim.ops.native.decoder import Norm, Projection, exact_rows, linear, max_rows, own_rows, rms_norm

# Half a step of rounding, and the error of an fp32 sum of K products of size 1.
TOLERANCE = {torch.bfloat16: (2.0**-8, 2e-5), torch.float32: (1e-6, 2e-5)}
DTYPES = tuple(TOLERANCE)
SHAPES = ((1, 1), (3, 5), (7, 33), (64, 64), (37, 100), (130, 515), (96, 1024), (70, 1601), (37, 3301))


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The kernel, whatever the number of rows, on an output poisoned with NaN."""
    out = torch.full((*x.shape[:-1], weight.shape[0]), float("nan"), dtype=x.dtype)
    extension.native().linear(x, weight, bias, out)
    return out


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t()
    relative, of_size = TOLERANCE[x.dtype]
    wrong = (out.double() - exact).abs() - (relative * exact.abs() + of_size * size)
    assert not out.isnan().any()
    assert float(wrong.max()) <= 0, float(wrong.max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size_out", "size_in"), SHAPES)
def test_every_number_of_rows(isa: str, size_out: int, size_in: int, dtype: torch.dtype) -> None:
    weight, bias = random(size_out, size_in, dtype=dtype), random(size_out, dtype=dtype)
    x = random(140, size_in, dtype=dtype)
    for rows in (*range(1, 41), 64, 65, 100, 140):
        check(run(x[:rows], weight), x[:rows], weight)
        check(run(x[:rows], weight, bias), x[:rows], weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(isa: str, dtype: torch.dtype) -> None:
    weight, x = random(75, 333, dtype=dtype), random(140, 333, dtype=dtype)
    alone = torch.cat([run(x[i : i + 1], weight) for i in range(140)])
    for rows in (2, 3, 4, 7, 12, 13, 16, 33, 64, 80, 100, 128, 140):
        assert torch.equal(run(x[:rows], weight), alone[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    weight = random(1000, 256, dtype=dtype)
    before = torch.get_num_threads()
    try:
        for rows in (1, 5, 40):
            x = random(rows, 256, dtype=dtype)
            torch.set_num_threads(1)
            one = run(x, weight)
            torch.set_num_threads(3)
            assert torch.equal(run(x, weight), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_shaped_rows(dtype: torch.dtype) -> None:
    weight = random(33, 40, dtype=dtype)
    wide = random(10, 100, dtype=dtype)
    for x in (wide[:, 7:47], wide[::2, :40], wide[:1, 3:43].expand(4, 40), wide[0, :40], wide[:0, :40]):
        y = linear(x, weight)
        assert y.shape == (*x.shape[:-1], 33)
        if x.numel():
            check(y, x, weight)
    deep = random(2, 3, 40, dtype=dtype)
    check(linear(deep, weight), deep, weight)
    assert linear(deep[:, :0], weight).shape == (2, 0, 33)
    turned = deep.transpose(0, 1)
    torch.testing.assert_close(
        linear(turned, weight), linear(turned.contiguous(), weight), rtol=0.02, atol=0.05
    )


def test_nan_and_infinity_stay_in_their_rows_and_outputs() -> None:
    weight, x = random(9, 70, dtype=torch.bfloat16), random(5, 70, dtype=torch.bfloat16)
    clean = run(x, weight)
    x[2, 69] = float("nan")
    weight[4, 68] = float("inf")
    y = run(x, weight)
    assert bool(y[2].isnan().all())
    assert bool(y[[0, 1, 3, 4], 4].isinf().all())
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(y[[0, 1, 3, 4]][:, others], clean[[0, 1, 3, 4]][:, others])


def test_other_tensors_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random(6, 8, dtype=torch.float32), random(2, 8, dtype=torch.float32)
    for dtype in (torch.float16, torch.float64):
        torch.testing.assert_close(
            linear(x.to(dtype), weight.to(dtype)), functional.linear(x.to(dtype), weight.to(dtype))
        )
    learned = weight.clone().requires_grad_()
    linear(x, learned).sum().backward()
    assert learned.grad is not None
    monkeypatch.setattr(linear_module, "native", lambda: pytest.fail("the kernel ran"))
    many = random(max_rows(torch.float32) + 1, 8, dtype=torch.float32)
    assert torch.equal(linear(many, weight), functional.linear(many, weight))


def test_limits_follow_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {
        ("amx", True): linear_module.ROWS_WITH_MATRICES,
        ("avx512bf16", True): linear_module.ROWS_WITH_PAIRS,
        ("avx512vnni", True): linear_module.ROWS_WITH_BF16_HARDWARE,
        ("avx2", False): sys.maxsize,
    }
    for (isa, has), rows in limits.items():
        max_rows.cache_clear()
        monkeypatch.setattr(linear_module, "native", lambda isa=isa: SimpleNamespace(isa=lambda: isa))
        monkeypatch.setattr(linear_module, "has_bf16_hardware", lambda has=has: has)
        assert max_rows(torch.bfloat16) == rows
    max_rows.cache_clear()
    assert max_rows(torch.float16) == 0
    max_rows.cache_clear()


def test_wrong_arguments_touch_no_memory() -> None:
    kernel = extension.native().linear
    weight, x, out = random(6, 8, dtype=torch.float32), random(2, 8, dtype=torch.float32), torch.empty(2, 6)
    for bad in (
        (x[:, :7], weight, None, out),
        (x.bfloat16(), weight, None, out),
        (x, weight, None, out.bfloat16()),
        (x, weight, None, torch.empty(3, 6)),
        (x, weight, None, torch.empty(6, 2).t()),
        (x, weight.t().contiguous().t(), None, out),
        (x, weight, torch.zeros(5), out),
        (random(2, 16, dtype=torch.float32)[:, ::2], weight, None, out),
    ):
        with pytest.raises((ValueError, TypeError)):
            kernel(*bad)
    with pytest.raises(TypeError):
        kernel(x.numpy(), weight, None, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 64, 100, 515])
def test_rms_norm(isa: str, dim: int, dtype: torch.dtype) -> None:
    x, weight, eps = random(37, dim, dtype=dtype), random(dim, dtype=dtype), 1e-5
    out = torch.full_like(x, float("nan"))
    extension.native().rms_norm(x, weight, eps, out)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    rtol = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=0.0)
    assert torch.equal(rms_norm(x[3:4], weight, eps), out[3:4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [9, 40, 72, 136, 512])
def test_inside_exact_rows_any_row_is_what_it_is_alone(isa: str, dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = random(rows, 515, dtype=dtype), random(130, 515, dtype=dtype), random(130, dtype=dtype)
    fused = Projection(weight, bias, norm=Norm(random(515, dtype=dtype), 1e-6))
    with exact_rows():
        together, behind_norm = linear(x, weight, bias), fused(x)
    assert torch.equal(together, torch.cat([linear(row, weight, bias) for row in x.split(1)]))
    assert torch.equal(behind_norm, torch.cat([fused(row) for row in x.split(1)]))


def test_exact_rows_end_with_their_block() -> None:
    many = 4096
    assert own_rows(many, torch.float16) == 0
    for dtype in DTYPES:
        before = own_rows(many, dtype)
        with exact_rows(40):
            assert own_rows(many, dtype) == max(before, 40)
        assert own_rows(many, dtype) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_behind_the_exact_ones_are_torchs(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((300, 64), (96, 64)))
    with exact_rows(40):
        found = linear(x, weight)
    alone = torch.cat([linear(row[None], weight) for row in x])
    if max_rows(dtype) < 300:
        assert torch.equal(found[40:], torch.nn.functional.linear(x[40:], weight))
    assert torch.equal(found[:40], alone[:40])
