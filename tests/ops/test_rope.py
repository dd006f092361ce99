"""Rotation against transformers' own, in both arrangements of dims, and against exact angles."""

from __future__ import annotations

import cmath
from dataclasses import replace

import pytest
import torch
from paged_oracle import noise
from transformers import Glm4Config, LlamaConfig
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_half

from kvreclaim.ops.rope import RopeLayout, from_bands, phases, rotate, to_bands

POSITIONS = torch.tensor([0, 1, 2, 17, 300, 4095])
FAR = 131_072
LAYOUTS = [
    RopeLayout(10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4), style, start)
    for style in ("half", "interleaved")
    for start in (0, 3, 8)
]


def name(layout: RopeLayout) -> str:
    return f"{layout.style}-{layout.start}"


EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=name)


def test_half_style_equals_llama() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16)
    rotary = LlamaRotaryEmbedding(config)
    q, k = noise(1, 1, 4, 6, 16), noise(2, 1, 2, 6, 16)
    cos, sin = rotary(q, POSITIONS[None])
    layout = RopeLayout(rotary.inv_freq.double(), "half")
    for x, want in zip((q, k), apply_half(q, k, cos, sin), strict=True):
        torch.testing.assert_close(rotate(x, POSITIONS, layout), want, atol=2e-4, rtol=0)


def test_interleaved_partial_style_equals_glm4() -> None:
    config = Glm4Config(hidden_size=64, num_attention_heads=4, head_dim=16)
    rotary = Glm4RotaryEmbedding(config)
    q, k = noise(1, 1, 4, 6, 16), noise(2, 1, 2, 6, 16)
    cos, sin = rotary(q, POSITIONS[None])
    layout = RopeLayout(rotary.inv_freq.double(), "interleaved")
    assert layout.num_bands == 4
    for x, want in zip((q, k), apply_interleaved(q, k, cos, sin), strict=True):
        torch.testing.assert_close(rotate(x, POSITIONS, layout), want, atol=2e-4, rtol=0)


@EVERY_LAYOUT
def test_rotation_turns_each_band_by_its_angle(layout: RopeLayout) -> None:
    x = noise(1, 2, 6, 16)
    turned = rotate(x, POSITIONS, layout)
    real, imag = layout.band_dims()
    for t, position in enumerate(POSITIONS.tolist()):
        for f, frequency in enumerate(layout.inv_freq.tolist()):
            band = complex(x[1, t, real[f]], x[1, t, imag[f]]) * cmath.exp(1j * frequency * position)
            got = complex(turned[1, t, real[f]], turned[1, t, imag[f]])
            assert abs(got - band) < 1e-6
    rest = layout.rest_dims(16)
    assert torch.equal(turned[..., rest], x[..., rest])


@EVERY_LAYOUT
def test_every_dim_is_in_a_band_or_in_the_rest(layout: RopeLayout) -> None:
    dims = torch.cat([*layout.band_dims(), layout.rest_dims(16)])
    assert dims.sort().values.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("style", "first", "second"), [("half", [3, 4], [5, 6]), ("interleaved", [3, 5], [4, 6])]
)
def test_where_the_dims_of_a_band_lie(style, first, second) -> None:
    real, imag = RopeLayout(torch.ones(2, dtype=torch.float64), style, 3).band_dims()
    assert real.tolist() == first
    assert imag.tolist() == second


@EVERY_LAYOUT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bands_and_rest_are_the_whole_vector(layout: RopeLayout, dtype: torch.dtype) -> None:
    x = noise(1, 2, 3, 16).to(dtype)
    bands = to_bands(x, layout)
    assert bands.dtype == (torch.complex128 if dtype == torch.float64 else torch.complex64)
    assert torch.equal(from_bands(bands, x[..., layout.rest_dims(16)], layout), x)


@EVERY_LAYOUT
@pytest.mark.parametrize("offset", [0, FAR])
def test_the_inverse_turns_back(layout: RopeLayout, offset: int) -> None:
    x = noise(1, 2, 6, 16)
    back = rotate(rotate(x, POSITIONS + offset, layout), POSITIONS + offset, layout, inverse=True)
    torch.testing.assert_close(back, x, atol=1e-6, rtol=0)


@EVERY_LAYOUT
def test_products_depend_on_the_distance_alone(layout: RopeLayout) -> None:
    q, k = noise(1, 1, 6, 16), noise(2, 1, 6, 16)
    near = (rotate(q, POSITIONS + 5, layout) * rotate(k, POSITIONS, layout)).sum(-1)
    far = (rotate(q, POSITIONS + FAR + 5, layout) * rotate(k, POSITIONS + FAR, layout)).sum(-1)
    torch.testing.assert_close(near, far, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    x = noise(1, 2, 6, 16).to(dtype)
    turned = rotate(x, POSITIONS, LAYOUTS[0])
    assert turned.dtype == dtype
    assert torch.equal(turned, rotate(x.float(), POSITIONS, LAYOUTS[0]).to(dtype))


def test_phases_at_position_131072_are_exact() -> None:
    """Exact to complex64's rounding; an fp32 angle would be off a thousand times as much."""
    layout = RopeLayout(500_000.0 ** -(torch.arange(32, dtype=torch.float64) / 32))
    positions = torch.tensor([FAR - 1, FAR])
    got = phases(positions, layout)
    assert got.dtype == torch.complex64
    for p, row in zip(positions.tolist(), got.tolist(), strict=True):
        for frequency, phase in zip(layout.inv_freq.tolist(), row, strict=True):
            assert abs(phase - cmath.exp(1j * frequency * p)) < 1e-7
    angle = positions[:, None].float() * layout.inv_freq.float()
    rough = torch.polar(torch.ones_like(angle), angle)
    assert (rough - got).abs().max() > 1e-4


def test_no_bands_means_no_rotation() -> None:
    layout = replace(LAYOUTS[0], inv_freq=torch.empty(0, dtype=torch.float64))
    x = noise(1, 2, 6, 16)
    assert torch.equal(rotate(x, POSITIONS, layout), x)
    assert layout.rest_dims(16).tolist() == list(range(16))
