"""kivi4's units: error bounds, where each parameter lies, and that tokens move as codes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvreclaim.kv_bytes import Geometry
from kvreclaim.ops.formats import FORMATS, kivi_codec
from kvreclaim.ops.formats.affine import CHANNEL_GRID, KEY_GRID, VALUE_GRID, Groups
from kvreclaim.ops.formats.kivi_codec import BY_TOKEN, OPEN, Units

SHAPES = [(8, 8, 4), (32, 32, 16), (80, 40, 16), (32, 32, 32), (64, 512, 16), (6, 10, 3), (66, 34, 5)]
ALL_SHAPES = pytest.mark.parametrize(("k_dim", "v_dim", "size"), SHAPES)
ROUNDING = 1 + 1e-4


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def half_step(x: Tensor, dim: int, *, reach: float, smallest: float) -> Tensor:
    """s / 2 of the group along `dim`, as large as the centre and the smallest scale ask for."""
    least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = torch.maximum((most - least) / 15, ((most + least) / 2).abs() / reach)
    return step.clamp_min(smallest) / 2 * ROUNDING


def keys_of(units: Units, k_dim: int, v_dim: int) -> Tensor:
    return kivi_codec.decode_keys(units.k, units.params, k_dim, v_dim)


def values_of(units: Units, k_dim: int, v_dim: int) -> Tensor:
    return kivi_codec.decode_values(units.v, units.params, k_dim, v_dim)


@st.composite
def units(draw) -> tuple[Tensor, Tensor]:
    """k [2, S, D] with channels of their own size and offset, v [2, S, Dv]; some zero, some constant."""
    k_dim, v_dim, size = draw(st.sampled_from(SHAPES))
    seed, scale = draw(st.integers(0, 999)), draw(st.sampled_from([0.1, 1.0, 20.0]))
    k = noise(2, size, k_dim, seed=seed) * scale * noise(k_dim, seed=seed + 1).exp()
    k += noise(k_dim, seed=seed + 2) * draw(st.sampled_from([0.0, 1.0, 30.0])) * scale
    v = noise(2, size, v_dim, seed=seed + 3) * min(scale, 3.0)
    kind = draw(st.sampled_from(["plain", "zeros", "equal", "huge"]))
    if kind == "zeros":
        k[..., ::2], v[:, 0] = 0, 0
    elif kind == "equal":
        k[:] = k[:, :1].clone()
        v[:] = v[..., :1].clone()
    elif kind == "huge":
        k[..., 1], v[..., 1] = k[..., 1] * 9, v[..., 1] * 9
    return k.clamp(-400, 400), v  # beyond the largest scale numbers are cut


@given(units())
@settings(max_examples=60, deadline=None)
def test_a_sealed_unit_is_within_half_a_step_of_each_channel_and_token(numbers) -> None:
    k, v = numbers
    dims = k.shape[-1], v.shape[-1]
    sealed = kivi_codec.seal(k, v)
    error = (keys_of(sealed, *dims) - k).abs()
    assert (error <= half_step(k, -2, reach=40.5, smallest=2.0**-10)).all()
    for got, want in zip(values_of(sealed, *dims).split(32, -1), v.split(32, -1), strict=True):
        assert ((got - want).abs() <= half_step(want, -1, reach=7.5, smallest=2.0**-8)).all()
    zeros = (k == 0).all(-2, keepdim=True).expand_as(k)
    assert not keys_of(sealed, *dims)[zeros].any()
    assert not values_of(sealed, *dims)[(v == 0).all(-1)].any()


def test_channels_with_offsets_are_as_exact_as_without() -> None:
    k = noise(64, 16, 32)
    offset = 5 * noise(32, seed=1)
    plain, moved = (
        (keys_of(kivi_codec.seal(x, x), 32, 32) - x).pow(2).mean().sqrt() for x in (k, k + offset)
    )
    by_token = Groups.encode(k + offset, KEY_GRID).decode(KEY_GRID) - k - offset
    assert moved < 1.1 * plain < 0.08
    assert by_token.pow(2).mean().sqrt() > 3 * moved


@ALL_SHAPES
def test_bytes_are_those_of_the_format(k_dim: int, v_dim: int, size: int) -> None:
    form = FORMATS["kivi4"]
    sealed = kivi_codec.seal(noise(size, k_dim), noise(size, v_dim))
    counted = sum(x.numel() for x in (sealed.k, sealed.v, sealed.params))
    assert counted == form.unit_bytes(k_dim, v_dim, size)
    assert sealed.params.numel() == Geometry(k_dim, v_dim, size).total


@ALL_SHAPES
def test_every_byte_by_channel(k_dim: int, v_dim: int, size: int) -> None:
    """Read byte by byte, as the drawing of the layout says."""
    k, v = noise(size, k_dim), noise(size, v_dim, seed=1)
    sealed = kivi_codec.seal(k, v)
    params, region = sealed.params.tolist(), max(2 * k_dim, 2 * size * -(-k_dim // 32) + 1)
    got = torch.empty(size, k_dim)
    for dim in range(k_dim):
        z, s = params[dim], params[k_dim + dim]
        assert s <= 253
        for slot in range(size):
            n = int(sealed.k[slot, dim // 2]) >> 4 * (dim % 2) & 15
            got[slot, dim] = 2.0 ** (s / 16 - 10) * (n - 7.5 + (z - 128) / 3)
    torch.testing.assert_close(got, keys_of(sealed, k_dim, v_dim), atol=1e-6, rtol=1e-6)
    assert params[region - 1] <= 253
    groups = -(-v_dim // 32)
    low = region + size * groups
    high = low + -(-size * groups // 2)
    got = torch.empty(size, v_dim)
    for slot in range(size):
        for dim in range(v_dim):
            place = dim // 32 * size + slot
            z = params[low + place // 2] >> 4 * (place % 2) & 15
            z += (params[high + place // 8] >> place % 8 & 1) << 4
            n = int(sealed.v[slot, dim // 2]) >> 4 * (dim % 2) & 15
            got[slot, dim] = 2.0 ** (params[region + place] / 22 - 8) * (n - 7.5 + (z - 16) / 2)
    torch.testing.assert_close(got, values_of(sealed, k_dim, v_dim), atol=1e-6, rtol=1e-6)


@ALL_SHAPES
def test_tokens_that_moved_are_int4s_groups(k_dim: int, v_dim: int, size: int) -> None:
    k, v = noise(3, size, k_dim), noise(3, size, v_dim, seed=1)
    keys, values = Groups.encode(k, KEY_GRID), Groups.encode(v, VALUE_GRID)
    moved = kivi_codec.join(keys, values)
    assert (moved.params[..., Geometry(k_dim, v_dim, size).state] == BY_TOKEN).all()
    assert torch.equal(keys_of(moved, k_dim, v_dim), keys.decode(KEY_GRID))
    assert torch.equal(values_of(moved, k_dim, v_dim), values.decode(VALUE_GRID))
    found = kivi_codec.token_keys(moved.k, moved.params, k_dim, v_dim)
    found_values = kivi_codec.token_values(moved.v, moved.params, k_dim, v_dim)
    for name in ("n", "s", "z"):
        assert torch.equal(getattr(found, name), getattr(keys, name))
        assert torch.equal(getattr(found_values, name), getattr(values, name))


def test_units_of_both_kinds_are_read_side_by_side() -> None:
    k, v = noise(2, 16, 32), noise(2, 16, 32, seed=1)
    sealed = kivi_codec.seal(k, v)
    moved = kivi_codec.join(Groups.encode(k, KEY_GRID), Groups.encode(v, VALUE_GRID))
    both = Units(
        *(torch.stack((getattr(sealed, name)[0], getattr(moved, name)[1])) for name in ("k", "v", "params"))
    )
    want = torch.stack((keys_of(sealed, 32, 32)[0], keys_of(moved, 32, 32)[1]))
    assert torch.equal(keys_of(both, 32, 32), want)
    assert not torch.equal(want[0], keys_of(moved, 32, 32)[0])


def test_no_scale_of_a_channel_says_something_else() -> None:
    """The greatest scale, in the last channel: its code is no state."""
    k = noise(16, 32) * 1e6
    sealed = kivi_codec.seal(k, noise(16, 32))
    state = int(sealed.params[Geometry(32, 32, 16).state])
    assert state == CHANNEL_GRID.scale.last < OPEN < BY_TOKEN
    assert keys_of(sealed, 32, 32).isfinite().all()


def test_cleared_memory_and_nan_are_zeros() -> None:
    geometry = Geometry(32, 32, 16)
    codes, params = torch.zeros(16, 16, dtype=torch.uint8), torch.zeros(geometry.total, dtype=torch.uint8)
    assert not kivi_codec.decode_keys(codes, params, 32, 32).any()
    sealed = kivi_codec.seal(torch.full((16, 32), torch.nan), torch.full((16, 32), torch.nan))
    assert not keys_of(sealed, 32, 32).any()
    assert not values_of(sealed, 32, 32).any()
