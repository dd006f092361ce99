"""Steps of recurrent layers from slot to slot against loops in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvreclaim.ops.native.recurrent import Convolution, DeltaStep, ShortConvStep, SsdStep, missing_steps

pytestmark = pytest.mark.skipif(missing_steps() is not None, reason="the native extension is older")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
SLOTS, READ, WRITE = 7, (4, 0, 5), (1, 6, 2)


class Numbers:
    """Reproducible random tensors."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)


def convolve(x: Tensor, old: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [C], old [C, kept] -> SiLU of the convolution, rounded as x is on the way, and the next state."""
    out, after = plainly_convolve(x, old, weight, bias)
    return functional.silu(out.double()).to(x.dtype).double(), after


def plainly_convolve(x: Tensor, old: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    seen = torch.cat([old, x[:, None]], 1)
    out = (seen[:, -weight.shape[1] :].double() * weight.double()).sum(1)
    return (out if bias is None else out + bias.double()).to(x.dtype), seen[:, 1:]


def silu(x: Tensor) -> Tensor:
    return functional.silu(x.double())


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert not got.isnan().any()
    largest = max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=TOLERANCE[dtype] * largest)


def check_states(
    got: tuple[Tensor, ...], before: tuple[Tensor, ...], want: Sequence[tuple[Tensor, ...]]
) -> None:
    """Written slots hold what is wanted, all others what they held."""
    for now, then in zip(got, before, strict=True):
        kept = [slot for slot in range(SLOTS) if slot not in WRITE]
        assert torch.equal(now[kept], then[kept])
    for slot, (conv, *rest) in zip(WRITE, want, strict=True):
        assert torch.equal(got[0][slot], conv)
        for now, state in zip(got[1:], rest, strict=True):
            close(now[slot], state, before[0].dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "groups", "k_dim", "v_dim", "width", "kept"),
    [
        (4, 2, 16, 16, 4, 4),
        (3, 3, 33, 21, 4, 4),
        (6, 2, 5, 70, 3, 2),
        (1, 1, 128, 128, 4, 3),
        (2, 1, 1, 1, 2, 5),
    ],
)
def test_delta_step(
    isa: str,
    threads: int,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    k_dim: int,
    v_dim: int,
    width: int,
    kept: int,
) -> None:
    """Pieces of a row lie apart and in another order than the channels."""
    random = Numbers(heads * v_dim + k_dim, dtype)
    channels, inner = 2 * groups * k_dim + heads * v_dim, heads * v_dim
    places = ((inner + 3, 2 * groups * k_dim), (0, inner))
    z, b = inner + 2 * groups * k_dim + 3, 2 * inner + 2 * groups * k_dim + 3
    head = torch.arange(heads)
    rows = random(3, b + 2 * heads + 1)
    weight, bias = random(channels, width), random(channels) if heads % 2 else None
    decay, dt_bias = -random(heads, dtype=torch.float32).exp(), random(heads, dtype=torch.float32)
    norm = random(v_dim)
    before = random(SLOTS, channels, kept), random(SLOTS, heads, k_dim, v_dim, dtype=torch.float32)
    conv, states = before[0].clone(), before[1].clone()
    step = DeltaStep(
        Convolution(weight, bias, places),
        (heads, groups, k_dim, v_dim),
        torch.stack([z + head * v_dim, b + head, b + heads + head]),
        decay,
        dt_bias,
        norm,
        1e-6,
    )
    out = step(rows, torch.tensor(READ), torch.tensor(WRITE), conv, states)
    wanted = []
    for row, slot, found in zip(rows, READ, out, strict=True):
        inputs = torch.cat([row[start : start + count] for start, count in places])
        x, next_conv = convolve(inputs, before[0][slot], weight, bias)
        q, k, v = x.split([groups * k_dim, groups * k_dim, inner])
        q, k = (each.view(groups, k_dim).repeat_interleave(heads // groups, 0) for each in (q, k))
        q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        beta = torch.sigmoid(row[b : b + heads].double()).to(dtype).double()
        g = decay.double() * functional.softplus(row[b + heads : b + 2 * heads].double() + dt_bias)
        state = before[1][slot].double() * g.exp()[:, None, None]
        delta = (v.view(heads, v_dim) - torch.einsum("hkv,hk->hv", state, k)) * beta[:, None]
        state = state + torch.einsum("hk,hv->hkv", k, delta)
        y = torch.einsum("hkv,hk->hv", state, q * k_dim**-0.5).to(dtype).double()
        y = (y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt()).to(dtype) * norm
        close(found, (y.double() * silu(row[z : z + inner].view(heads, v_dim))).flatten(), dtype)
        wanted.append((next_conv, state))
    check_states((conv, states), before, wanted)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", ["none", "behind", "before"])
@pytest.mark.parametrize(
    ("heads", "dim", "groups", "size", "width", "kept"),
    [(8, 16, 1, 16, 4, 4), (6, 5, 3, 33, 4, 4), (2, 64, 2, 128, 3, 4), (1, 1, 1, 1, 4, 3)],
)
def test_ssd_step(
    isa: str,
    threads: int,
    dtype: torch.dtype,
    norm: str,
    heads: int,
    dim: int,
    groups: int,
    size: int,
    width: int,
    kept: int,
) -> None:
    random = Numbers(heads * dim + size, dtype)
    inner, channels = heads * dim, heads * dim + 2 * groups * size
    rows = random(3, inner + channels + heads)
    weight, bias = random(channels, width), None if norm == "none" else random(channels)
    a, d, dt_bias = (random(heads, dtype=torch.float32) for _ in range(3))
    a, dt_bias = -a.exp(), dt_bias.to(dtype).float()
    norm_weight, norm_groups = random(inner), groups
    before = random(SLOTS, channels, kept), random(SLOTS, heads, dim, size, dtype=torch.float32)
    conv, states = before[0].clone(), before[1].clone()
    more: dict[str, Any] = {
        "norm": norm_weight,
        "norm_groups": norm_groups,
        "eps": 1e-5,
        "norm_before_gate": norm == "before",
    }
    step = SsdStep(
        Convolution(weight, bias, ((inner, channels),)),
        (heads, dim, groups, size),
        (0, inner + channels),
        a,
        d,
        dt_bias,
        **({} if norm == "none" else more),
    )
    out = step(rows, torch.tensor(READ), torch.tensor(WRITE), conv, states)
    wanted = []
    for row, slot, found in zip(rows, READ, out, strict=True):
        z, inputs, raw = row.split([inner, channels, heads])
        seen, next_conv = convolve(inputs, before[0][slot], weight, bias)
        x, b, c = seen.split([inner, groups * size, groups * size])
        x = x.view(heads, dim)
        b, c = (each.view(groups, size).repeat_interleave(heads // groups, 0) for each in (b, c))
        dt = functional.softplus((raw + dt_bias.to(dtype)).double()).to(dtype).double()
        state = before[1][slot].double() * (dt * a).exp()[:, None, None]
        state = state + torch.einsum("h,hp,hn->hpn", dt, x, b)
        y = (torch.einsum("hpn,hn->hp", state, c) + x * d[:, None]).flatten().to(dtype).double()
        gate = silu(z)
        if norm == "none":
            y = y * gate
        else:
            y = (y if norm == "before" else y * gate).view(norm_groups, -1)
            y = (y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt()).flatten() * norm_weight
            y = y * gate if norm == "before" else y
        close(found, y, dtype)
        wanted.append((next_conv, state))
    check_states((conv, states), before, wanted)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("channels", "width", "kept"), [(64, 3, 3), (301, 3, 3), (37, 4, 5), (1, 1, 1)])
def test_short_conv_step(
    isa: str, threads: int, dtype: torch.dtype, channels: int, width: int, kept: int
) -> None:
    random = Numbers(channels, dtype)
    rows, weight, bias = random(3, 3 * channels), random(channels, width), random(channels)
    before = (random(SLOTS, channels, kept),)
    conv = before[0].clone()
    out = ShortConvStep(Convolution(weight, bias, ()))(rows, torch.tensor(READ), torch.tensor(WRITE), conv)
    wanted = []
    for row, slot, found in zip(rows, READ, out, strict=True):
        b, c, x = row.split(channels)
        seen, next_conv = plainly_convolve(b * x, before[0][slot], weight, bias)
        close(found, c * seen, dtype)
        wanted.append((next_conv,))
    check_states((conv,), before, wanted)


def test_a_row_does_not_depend_on_the_others(isa: str) -> None:
    random = Numbers(1, torch.bfloat16)
    heads, dim, size = 4, 24, 40
    channels = heads * dim + 2 * size
    convolution = Convolution(random(channels, 4), None, ((heads * dim, channels),))
    vectors = [random(heads, dtype=torch.float32) for _ in range(3)]
    step = SsdStep(convolution, (heads, dim, 1, size), (0, heads * dim + channels), *vectors)
    rows = random(3, heads * dim + channels + heads)
    conv, states = random(SLOTS, channels, 4), random(SLOTS, heads, dim, size, dtype=torch.float32)
    together = step(rows, torch.tensor(READ), torch.tensor(WRITE), conv, states)
    written = states[list(WRITE)].clone()
    for i, (read, write) in enumerate(zip(READ, WRITE, strict=True)):
        alone = step(rows[i : i + 1], torch.tensor([read]), torch.tensor([write]), conv, states)
        assert torch.equal(alone[0], together[i])
        assert torch.equal(states[write], written[i])


def test_slots_and_shapes_are_checked() -> None:
    random = Numbers(2, torch.float32)
    step = SsdStep(Convolution(random(8, 4), None, ((4, 8),)), (2, 2, 1, 2), (0, 12), *(random(2),) * 3)
    rows, conv, states = random(1, 14), random(3, 8, 4), random(3, 2, 2, 2)
    at = torch.tensor([0])
    for bad in (
        (rows, torch.tensor([3]), at, conv, states),
        (rows, at, torch.tensor([-1]), conv, states),
        (rows[:, :13], at, at, conv, states),
        (rows, at, at, conv[..., :2], states),
        (rows, at, at, conv[:2], states),
        (rows, at, at, conv, states[..., :1]),
    ):
        with pytest.raises(ValueError, match=r"slot|rows|keeps|shape"):
            step(*bad)
