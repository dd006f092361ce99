"""Recurrent layers from slot to slot, steps and prompts, against loops over tokens in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvreclaim.ops.native.recurrent import (
    Convolution,
    DeltaStep,
    SelectiveScan,
    ShortConvStep,
    SiluConvStep,
    SsdStep,
    missing_steps,
)
from kvreclaim.ops.states import PackedRuns, StateRun

pytestmark = pytest.mark.skipif(missing_steps() is not None, reason="the native extension is older")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
SLOTS = 7
LIMITS = (0.25, 1.5)
RUNS = {
    "steps": (StateRun(0, 1, 4, [1]), StateRun(1, 1, 0, [6]), StateRun(2, 1, 5, [2])),
    "prompts": (StateRun(0, 140, None, [1]), StateRun(140, 131, 0, [6, 3, 2]), StateRun(271, 1, 5, [4])),
}
"""The last two tokens of the second prompt are drafts; both are longer than a kernel's round."""
Token = Callable[[Tensor, tuple[Tensor, ...], bool], tuple[Tensor, tuple[Tensor, ...]]]
"""One token's row, a sequence's states, whether it is of a prompt -> its output, the states behind it."""


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


def num_rows(runs: tuple[StateRun, ...]) -> int:
    return runs[-1].start + runs[-1].num_tokens


def check(
    runs: tuple[StateRun, ...],
    rows: Tensor,
    out: Tensor,
    before: tuple[Tensor, ...],
    after: tuple[Tensor, ...],
    token: Token,
) -> None:
    """Outputs and written slots hold what token by token is found, other slots what they held."""
    dtype, written = rows.dtype, set[int]()
    for run in runs:
        empty = tuple(torch.zeros_like(each[0]) for each in before)
        states = empty if run.slot is None else tuple(each[run.slot] for each in before)
        num_known = run.num_tokens - len(run.writes) + 1
        found = list[Tensor]()
        for n in range(run.num_tokens):
            in_prompt = n < num_known and (num_known > 1 or run.slot is None)
            one, states = token(rows[run.start + n], states, in_prompt)
            found.append(one)
            if n >= num_known - 1:
                slot = run.writes[n - num_known + 1]
                written.add(slot)
                assert torch.equal(after[0][slot], states[0])
                for now, state in zip(after[1:], states[1:], strict=True):
                    close(now[slot], state, dtype)
        close(out[run.start : run.start + run.num_tokens], torch.stack(found), dtype)
    kept = [slot for slot in range(SLOTS) if slot not in written]
    assert all(torch.equal(now[kept], then[kept]) for now, then in zip(after, before, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
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
    runs: tuple[StateRun, ...],
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
    rows = random(num_rows(runs), b + 2 * heads + 1)
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
    out = step(rows, PackedRuns.of(runs), conv, states)

    def token(row: Tensor, known: tuple[Tensor, ...], in_prompt: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        inputs = torch.cat([row[start : start + count] for start, count in places])
        x, next_conv = convolve(inputs, known[0], weight, bias)
        q, k, v = x.split([groups * k_dim, groups * k_dim, inner])
        q, k = (each.view(groups, k_dim).repeat_interleave(heads // groups, 0) for each in (q, k))
        q, k = (each / (each.square().sum(1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        beta = torch.sigmoid(row[b : b + heads].double()).to(dtype).double()
        g = decay.double() * functional.softplus(row[b + heads : b + 2 * heads].double() + dt_bias)
        state = known[1].double() * g.exp()[:, None, None]
        delta = (v.view(heads, v_dim) - torch.einsum("hkv,hk->hv", state, k)) * beta[:, None]
        state = state + torch.einsum("hk,hv->hkv", k, delta)
        y = torch.einsum("hkv,hk->hv", state, q * k_dim**-0.5).to(dtype).double()
        y = (y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt()).to(dtype) * norm
        return (y.double() * silu(row[z : z + inner].view(heads, v_dim))).flatten(), (next_conv, state)

    check(runs, rows, out, before, (conv, states), token)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("norm", ["none", "behind", "before"])
@pytest.mark.parametrize(
    ("heads", "dim", "groups", "size", "width", "kept"),
    [(8, 16, 1, 16, 4, 4), (6, 5, 3, 33, 4, 4), (2, 64, 2, 128, 3, 4), (1, 3, 1, 1, 4, 3)],
)
def test_ssd_step(
    isa: str,
    threads: int,
    runs: tuple[StateRun, ...],
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
    rows = random(num_rows(runs), inner + channels + heads)
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
        dt_limits=LIMITS,
    )
    out = step(rows, PackedRuns.of(runs), conv, states)

    def token(row: Tensor, known: tuple[Tensor, ...], in_prompt: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        z, inputs, raw = row.split([inner, channels, heads])
        seen, next_conv = convolve(inputs, known[0], weight, bias)
        x, b, c = seen.split([inner, groups * size, groups * size])
        x = x.view(heads, dim)
        b, c = (each.view(groups, size).repeat_interleave(heads // groups, 0) for each in (b, c))
        dt = functional.softplus((raw + dt_bias.to(dtype)).double()).to(dtype).double()
        dt = dt.clamp(*LIMITS) if in_prompt else dt
        state = known[1].double() * (dt * a).exp()[:, None, None]
        state = state + torch.einsum("h,hp,hn->hpn", dt, x, b)
        y = (torch.einsum("hpn,hn->hp", state, c) + x * d[:, None]).flatten().to(dtype).double()
        gate = silu(z)
        if norm == "none":
            y = y * gate
        else:
            y = (y if norm == "before" else y * gate).view(norm_groups, -1)
            y = (y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt()).flatten() * norm_weight
            y = y * gate if norm == "before" else y
        return y, (next_conv, state)

    check(runs, rows, out, before, (conv, states), token)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(("channels", "width", "kept"), [(64, 3, 3), (301, 3, 3), (37, 4, 5), (1, 1, 1)])
def test_short_conv_step(
    isa: str,
    threads: int,
    runs: tuple[StateRun, ...],
    dtype: torch.dtype,
    channels: int,
    width: int,
    kept: int,
) -> None:
    random = Numbers(channels, dtype)
    rows, weight, bias = random(num_rows(runs), 3 * channels), random(channels, width), random(channels)
    before = (random(SLOTS, channels, kept),)
    conv = before[0].clone()
    out = ShortConvStep(Convolution(weight, bias, ()))(rows, PackedRuns.of(runs), conv)

    def token(row: Tensor, known: tuple[Tensor, ...], in_prompt: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        b, c, x = row.split(channels)
        seen, next_conv = plainly_convolve(b * x, known[0], weight, bias)
        return c * seen, (next_conv,)

    check(runs, rows, out, before, (conv,), token)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(("channels", "width", "kept"), [(64, 4, 4), (301, 4, 3), (1, 1, 1)])
def test_silu_conv_step(
    isa: str,
    threads: int,
    runs: tuple[StateRun, ...],
    dtype: torch.dtype,
    channels: int,
    width: int,
    kept: int,
) -> None:
    random = Numbers(channels, dtype)
    rows, weight, bias = random(num_rows(runs), channels + 3), random(channels, width), random(channels)
    before = (random(SLOTS, channels, kept),)
    conv = before[0].clone()
    out = SiluConvStep(Convolution(weight, bias, ((2, channels),)))(rows, PackedRuns.of(runs), conv)

    def token(row: Tensor, known: tuple[Tensor, ...], in_prompt: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        found, next_conv = convolve(row[2 : 2 + channels], known[0], weight, bias)
        return found, (next_conv,)

    check(runs, rows, out, before, (conv,), token)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("channels", "size"), [(128, 16), (70, 16), (5, 33), (1, 1)])
def test_selective_scan(
    isa: str,
    threads: int,
    runs: tuple[StateRun, ...],
    dtype: torch.dtype,
    normed: bool,
    channels: int,
    size: int,
) -> None:
    """z, B and C are parts of longer rows; dt is from far below 0 to above 20, where softplus is another."""
    random = Numbers(channels + size, dtype)
    count = num_rows(runs)
    x, dt = random(count, channels), random(count, channels)
    dt[::7] *= 9
    z, bc = random(count, channels + 5)[:, 3 : 3 + channels], random(count, 2 * size + 3)[:, 3:]
    a, d = -random(channels, size, dtype=torch.float32).exp(), random(channels, dtype=torch.float32)
    norms = (random(size), random(size)) if normed else None
    states = (random(SLOTS, channels, size, dtype=torch.float32),)
    after = states[0].clone()
    out = SelectiveScan(a, d, norms, 1e-5)(x, dt, z, bc, PackedRuns.of(runs), after)
    rows = torch.cat([x, dt, z, bc], 1)

    def normal(part: Tensor, number: int) -> Tensor:
        if norms is None:
            return part.double()
        part = (part.double() / (part.double().square().mean() + 1e-5).sqrt()).to(dtype)
        return (part * norms[number]).double()

    def token(row: Tensor, known: tuple[Tensor, ...], in_prompt: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, dt, z, b, c = row.split([channels, channels, channels, size, size])
        b, c = normal(b, 0), normal(c, 1)
        dt = functional.softplus(dt.double()).to(dtype).double()
        state = known[1].double() * (dt[:, None] * a).exp() + (dt * x.double())[:, None] * b
        y = (state @ c).to(dtype).double() + x.double() * d
        return y * silu(z).to(dtype).double(), (known[0], state)

    nothing = torch.zeros(SLOTS)
    check(runs, rows, out, (nothing, *states), (nothing, after), token)


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_a_sequence_does_not_depend_on_the_others(isa: str, runs: tuple[StateRun, ...]) -> None:
    random = Numbers(1, torch.bfloat16)
    heads, dim, size = 4, 24, 40
    channels = heads * dim + 2 * size
    convolution = Convolution(random(channels, 4), None, ((heads * dim, channels),))
    a, d, dt_bias = (random(heads, dtype=torch.float32) for _ in range(3))
    step = SsdStep(convolution, (heads, dim, 1, size), (0, heads * dim + channels), -a.exp(), d, dt_bias)
    rows = random(num_rows(runs), heads * dim + channels + heads)
    conv, states = random(SLOTS, channels, 4), random(SLOTS, heads, dim, size, dtype=torch.float32)
    together = step(rows, PackedRuns.of(runs), conv, states)
    after = states.clone()
    for run in runs:
        alone = StateRun(0, run.num_tokens, run.slot, run.writes)
        part = slice(run.start, run.start + run.num_tokens)
        assert torch.equal(step(rows[part], PackedRuns.of([alone]), conv, states), together[part])
    assert torch.equal(states, after)


def test_slots_and_shapes_are_checked() -> None:
    random = Numbers(2, torch.float32)
    step = SsdStep(Convolution(random(8, 4), None, ((4, 8),)), (2, 2, 1, 2), (0, 12), *(random(2),) * 3)
    rows, conv, states = random(1, 14), random(3, 8, 4), random(3, 2, 2, 2)
    first = torch.tensor([0])
    good = PackedRuns(torch.tensor([0, 1]), first, first)
    for bad in (
        (rows, replace(good, read=torch.tensor([3])), conv, states),
        (rows, replace(good, write=torch.tensor([-1])), conv, states),
        (rows, replace(good, write=torch.tensor([3])), conv, states),
        (rows, replace(good, starts=torch.tensor([0, 2])), conv, states),
        (rows, replace(good, starts=torch.tensor([0, 0, 1]), read=torch.tensor([0, 1])), conv, states),
        (rows[:, :13], good, conv, states),
        (rows, good, conv[..., :2], states),
        (rows, good, conv[:2], states),
        (rows, good, conv, states[..., :1]),
    ):
        with pytest.raises(ValueError, match=r"slot|rows|ascend|keeps|shape"):
            step(*bad)


def test_slots_and_shapes_of_a_scan_are_checked() -> None:
    random = Numbers(2, torch.float32)
    scan = SelectiveScan(random(4, 2), random(4), (random(2), random(2)), 1e-5)
    x, bc, states, first = random(1, 4), random(1, 4), random(3, 4, 2), torch.tensor([0])
    good = PackedRuns(torch.tensor([0, 1]), first, first)
    for bad in (
        (x, x, x, bc, replace(good, read=torch.tensor([3])), states),
        (x, x, x, bc, replace(good, write=torch.tensor([-1])), states),
        (x, x[:, :3], x, bc, good, states),
        (x, x, x.bfloat16(), bc, good, states),
        (x.bfloat16(), x, x, bc, good, states),
        (x, x, x, bc[:, :3], good, states),
        (x, x, random(4, 1).t().repeat(1, 2)[:, ::2], bc, good, states),
        (x, x, x, bc, good, states[:, :3]),
    ):
        with pytest.raises(ValueError, match=r"slot|dtype|dense|shape"):
            scan(*bad)


def test_a_state_that_decays_fast_is_kept(isa: str) -> None:
    """Factors from 1 to e^-200 within few tokens: nothing becomes infinite, and what is left is right."""
    random, heads, dim, size = Numbers(3, torch.float32), 2, 40, 24
    channels = heads * dim + 2 * size
    convolution = Convolution(random(channels, 2), None, ((heads * dim, channels),))
    a, d, dt_bias = torch.tensor([-20.0, -1e-3]), random(heads), torch.zeros(heads)
    step = SsdStep(convolution, (heads, dim, 1, size), (0, heads * dim + channels), a, d, dt_bias)
    rows = random(90, heads * dim + channels + heads)
    rows[:, -heads:] *= 10
    conv, states = random(SLOTS, channels, 2), random(SLOTS, heads, dim, size)
    other = conv.clone(), states.clone()
    whole = step(rows, PackedRuns.of([StateRun(0, 90, 0, [1])]), conv, states)
    slots = [0, *([2, 3] * 45)]
    parts = [
        step(rows[n : n + 1], PackedRuns.of([StateRun(0, 1, slots[n], [slots[n + 1]])]), *other)
        for n in range(90)
    ]
    close(whole, torch.cat(parts), torch.float32)
    close(states[1], other[1][slots[90]], torch.float32)
