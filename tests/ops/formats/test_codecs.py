"""What a written key or value comes back as: error bounds, published examples, and the formats of torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvreclaim.ops.formats import FORMATS, KVFormat, scales
from kvreclaim.ops.formats.affine import Groups
from kvreclaim.ops.formats.codecs import (
    LEVELS,
    decode_keys,
    decode_rotated,
    encode,
    level_table,
    pack,
    round_trip,
    scale_code,
    unpack,
)
from kvreclaim.ops.formats.hadamard import rotate

INT8, FP8, INT4, TURBO = (FORMATS[name] for name in ("int8", "fp8_e4m3", "int4", "turboquant4"))
MIXED = FORMATS["int8+int4"]
CODED = pytest.mark.parametrize("fmt", [INT8, FP8, INT4, TURBO], ids=lambda fmt: fmt.name)
DIMS = (2, 8, 24, 32, 40, 64, 80, 128)


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def keys_back(fmt: KVFormat, x: Tensor) -> Tensor:
    """x written as keys and read again; as values it must be the same."""
    keys, values = round_trip(fmt, x, x)
    assert torch.equal(keys, values)
    return keys


def key_scale(params: Tensor) -> Tensor:
    """The code of the key's scale among the parameters [..., 3] of formats with one scale per vector."""
    return scale_code(params[..., :1], params[..., 2] & 15)


def in_groups(x: Tensor) -> list[Tensor]:
    return list(x.split(32, -1))


@st.composite
def vectors(draw) -> Tensor:
    """[n, D] numbers of any size between .1 and 16, some with zeros, all equal, or one dim that is huge."""
    dim = draw(st.sampled_from(DIMS))
    x = noise(draw(st.integers(1, 5)), dim, seed=draw(st.integers(0, 999)))
    kind = draw(st.sampled_from(["plain", "zeros", "equal", "huge"]))
    if kind == "zeros":
        x = x * (noise(*x.shape, seed=1) > draw(st.sampled_from([0.0, 1.0, 9.0])))
    elif kind == "equal":
        x = x[:, :1].expand(-1, dim).clone()
    elif kind == "huge":
        x[:, draw(st.integers(0, dim - 1))] *= 8
    return x * 10.0 ** draw(st.floats(-1, 1.2))


@settings(max_examples=150, deadline=None)
@given(vectors())
def test_int8_is_within_half_a_step(x: Tensor) -> None:
    """s = amax / 127, never less than the smallest scale."""
    step = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(2**-13)
    assert ((keys_back(INT8, x) - x).abs() <= step / 2 * 1.0001).all()


@settings(max_examples=150, deadline=None)
@given(vectors())
def test_int4_is_within_half_a_step(x: Tensor) -> None:
    """The step of rotated numbers: s = (max - min) / 15 in each group of 32 dims, or abs(centre) / 40.5 where
    that is more. Whatever the vector, its length is then off by sqrt(D) s / 2 at most."""
    turned, got = rotate(x), rotate(keys_back(INT4, x))
    rounding = 1e-6 * torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    for part, back in zip(in_groups(turned), in_groups(got), strict=True):
        least, most = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        step = torch.maximum((most - least) / 15, (least + most).abs() / 2 / 40.5).clamp_min(2**-10)
        assert ((back - part).abs() <= step / 2 * 1.0001 + rounding).all()


def test_one_large_channel_costs_int4_less_than_a_group_that_holds_it() -> None:
    """What the rotation is for; on numbers that are normal anyway it changes nothing."""
    plain = noise(2000, 64)
    spiked = plain.clone()
    spiked[:, 20] *= 20
    for x, least, most in ((plain, 0.98, 1.02), (spiked, 0.0, 0.8)):
        by_group = Groups.encode(x).decode()
        share = (keys_back(INT4, x) - x).square().mean().sqrt() / (by_group - x).square().mean().sqrt()
        assert least < share < most


@settings(max_examples=100, deadline=None)
@given(vectors())
def test_fp8_is_what_torch_stores(x: Tensor) -> None:
    """Numbers over the scale of their vector, as torch.float8_e4m3fn; the largest of 448 is 2^-4 coarse."""
    codes, _, params = encode(FP8, x, x)
    scale = scales.FP8.decode(key_scale(params))[..., None]
    want = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes, want.view(torch.uint8))
    half = torch.maximum(x.abs() * 2**-4, scale * 2**-10)
    assert ((keys_back(FP8, x) - x).abs() <= half * 1.0001).all()


@settings(max_examples=100, deadline=None)
@given(vectors())
def test_turboquant_takes_the_nearest_level_of_each_rotated_number(x: Tensor) -> None:
    x, levels = x / 4, level_table(x.device)[0]
    codes, _, params = encode(TURBO, x, x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = scales.TURBO.decode(key_scale(params))[..., None]
    exact = norm / x.shape[-1] ** 0.5
    assert ((scale <= exact * 1.0001) | (scale <= 2**-9 * 1.01)).all()
    assert ((scale >= exact * 2 ** (-1 / 256) * 0.9999) | (norm == 0)).all()
    got = decode_rotated(codes, key_scale(params))
    nearest = (rotate(x)[..., None] / scale[..., None] - levels).abs().amin(-1) * scale
    assert ((got - rotate(x)).abs() <= nearest * 1.0001 + 1e-6 * norm).all()
    error = (keys_back(TURBO, x) - x).square().sum(-1)
    torch.testing.assert_close(error, (got - rotate(x)).square().sum(-1), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_turboquant_loses_what_its_levels_lose(dim: int) -> None:
    """A normal number loses .0095 of its variance to 16 levels; any vector about as much after the rotation,
    a bit less in few dims, where the norm that is stored leaves the last number little choice."""
    for x in (noise(4000, dim), noise(4000, dim).pow(3), noise(4000, dim) + 5 * noise(dim, seed=1)):
        share = (keys_back(TURBO, x) - x).square().sum(-1) / x.square().sum(-1)
        assert share.mean().item() == pytest.approx(0.0088, abs=0.0008)


@CODED
@pytest.mark.parametrize("dim", DIMS)
def test_zeros_and_cleared_memory_are_zeros(fmt: KVFormat, dim: int) -> None:
    x = torch.zeros(3, dim)
    assert not keys_back(fmt, x).any()
    codes = torch.zeros(3, fmt.keys.code_bytes(dim), dtype=torch.uint8)
    params = torch.zeros(3, fmt.slot_params(dim, dim), dtype=torch.uint8)
    if fmt is not INT8:
        assert not decode_keys(fmt, codes, params, dim, dim).any()


@CODED
def test_equal_numbers_come_back_as_nearly_equal_numbers(fmt: KVFormat) -> None:
    for number in (3.7, -3.7, 0.11, -250.0):
        x = torch.full((1, 64), number)
        within = {"int8": 1 / 254, "fp8_e4m3": 2**-4, "int4": 0.4, "turboquant4": 0.6}[fmt.name]
        assert (keys_back(fmt, x) - x).abs().max() <= abs(number) * within * 1.001


@pytest.mark.parametrize("fmt", [INT8, FP8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("size", [0.05, 1.0, 30.0])
def test_writing_what_was_read_changes_nothing(fmt: KVFormat, size: float) -> None:
    back = keys_back(fmt, noise(2000, 64) * size)
    assert torch.equal(keys_back(fmt, back), back)


@CODED
def test_no_input_makes_a_number_that_is_none(fmt: KVFormat) -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1.0, -1e38, 1e38, 1e-42, 0.0])
    for x in (odd, odd.bfloat16(), odd[:2].expand(4, 2)):
        assert keys_back(fmt, x).isfinite().all()
    alone = torch.tensor([math.nan, 1.0, -2.0, 0.5] * 8)
    assert torch.equal(keys_back(fmt, alone), keys_back(fmt, alone.nan_to_num(0.0)))


@CODED
def test_keys_and_values_have_scales_of_their_own(fmt: KVFormat) -> None:
    """Different widths, sizes 1,000 apart: each comes back as it does alone."""
    k, v = noise(7, 2, 40) * 50, noise(7, 2, 64) * 0.05
    keys, values = round_trip(fmt, k, v)
    assert torch.equal(keys, keys_back(fmt, k))
    assert torch.equal(values, keys_back(fmt, v))


def test_a_mixed_format_has_keys_of_the_first_and_values_of_the_second() -> None:
    k, v = noise(7, 2, 40) * 50, noise(7, 2, 72)
    keys, values = round_trip(MIXED, k, v)
    assert torch.equal(keys, keys_back(INT8, k))
    assert torch.equal(values, keys_back(INT4, v))
    low, groups, high = encode(MIXED, k, v)[2].split([1, 6, 1], -1)
    both, alone = encode(INT8, k, k)[2], encode(INT4, v, v)[2]
    assert torch.equal(low, both[..., :1])
    assert torch.equal(high, both[..., 2:] & 15)
    assert torch.equal(groups, alone[..., :6])


@pytest.mark.parametrize("fmt", [INT8, FP8, INT4, TURBO, MIXED], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(8, 8), (32, 32), (80, 40), (64, 512)])
def test_codes_and_parameters_take_the_bytes_of_the_format(fmt: KVFormat, k_dim: int, v_dim: int) -> None:
    parts = encode(fmt, noise(5, 3, k_dim), noise(5, 3, v_dim))
    assert [part.dtype for part in parts] == [torch.uint8] * 3
    codes = fmt.keys.code_bytes(k_dim), fmt.values.code_bytes(v_dim)
    widths = (*codes, fmt.slot_params(k_dim, v_dim))
    assert tuple(part.shape for part in parts) == tuple((5, 3, width) for width in widths)


def test_int8_of_the_published_example() -> None:
    x = torch.tensor([0.1, -2.54, 1.2])
    stored, _, params = encode(INT8, x, x)
    assert (stored.int() - 128).tolist() == [5, -127, 60]
    assert scales.INT8.decode(key_scale(params)).item() == pytest.approx(0.02, rel=1 / 256)


def test_levels_are_lloyds_and_maxs() -> None:
    """Each is the mean of the normal numbers that are nearer to it than to any other."""
    x = noise(2_000_000)
    levels, bounds = level_table(x.device)
    assert levels[8:].tolist() == pytest.approx(LEVELS)
    place = torch.bucketize(x, bounds)
    means = torch.zeros(16).index_add(0, place, x) / torch.bincount(place, minlength=16)
    torch.testing.assert_close(means, levels, atol=0.02, rtol=0)


def test_nibbles_and_scale_bytes() -> None:
    numbers = torch.randint(0, 16, (5, 3, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack(pack(numbers)), numbers.to(torch.uint8))
    assert pack(torch.tensor([3, 12])).tolist() == [3 | 12 << 4]
    k, v = torch.full((1, 8), 127.0) * 2.0**-3, torch.full((1, 8), 127.0) * 2.0**-12
    assert encode(INT8, k, v)[2].tolist() == [[2560 & 255, 256 & 255, 2560 >> 8 | 256 >> 8 << 4]]
    assert scale_code(torch.tensor([[0x23], [0xFF]]), torch.tensor([0x1, 0xF])).tolist() == [0x123, 4095]
