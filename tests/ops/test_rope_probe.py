"""The rotation that vectors have been given is found, and none where they have been given another thing."""

from __future__ import annotations

import cmath
from dataclasses import replace

import pytest
import torch
from paged_oracle import noise
from torch import Tensor

from kvreclaim.ops.rope import RopeLayout
from kvreclaim.ops.rope_probe import POSITIONS, find_rope, loudest

DIM, HEADS = 16, 3
FREQUENCIES = [theta ** -(torch.arange(4, dtype=torch.float64) / 4) for theta in (10_000.0, 500.0)]
LAYOUTS = [
    RopeLayout(frequencies, style, start)
    for frequencies in FREQUENCIES
    for style in ("half", "interleaved")
    for start in (0, DIM - 8)
]
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.style}-{x.start}")
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def turned(vectors: Tensor, layout: RopeLayout, dtype: torch.dtype = torch.float32) -> Tensor:
    """[H, D] -> [T, H, D] at POSITIONS, band by band; sines and cosines rounded to the dtype as well."""
    out = vectors.repeat(len(POSITIONS), 1, 1)
    pairs = list(zip(*layout.band_dims(), layout.inv_freq.tolist(), strict=True))
    for t, position in enumerate(POSITIONS):
        for real, imag, frequency in pairs:
            turn = cmath.exp(1j * frequency * position)
            cos, sin = torch.tensor([turn.real, turn.imag]).to(dtype).float()
            x, y = vectors[:, real], vectors[:, imag]
            out[t, :, real], out[t, :, imag] = x * cos - y * sin, x * sin + y * cos
    return out.to(dtype)


def same(found: RopeLayout | None, layout: RopeLayout) -> bool:
    assert found is not None
    alike = torch.equal(found.inv_freq, layout.inv_freq)
    return alike and (found.style, found.start) == (layout.style, layout.start)


@EVERY_DTYPE
@EVERY_LAYOUT
def test_keys_alone_tell_the_rotation(layout: RopeLayout, dtype: torch.dtype) -> None:
    keys = turned(noise(1, HEADS, DIM), layout, dtype)
    assert same(find_rope(None, keys, FREQUENCIES), layout)


@EVERY_LAYOUT
def test_queries_have_to_agree(layout: RopeLayout) -> None:
    keys = turned(noise(1, HEADS, DIM), layout)
    assert same(find_rope(turned(noise(2, 2 * HEADS, DIM), layout), keys, FREQUENCIES), layout)
    for other in (replace(layout, inv_freq=layout.inv_freq * 1.1), replace(layout, start=8 - layout.start)):
        assert find_rope(turned(noise(2, 2 * HEADS, DIM), other), keys, FREQUENCIES) is None


@EVERY_DTYPE
def test_massive_dims_do_not_hide_the_others(dtype: torch.dtype) -> None:
    vectors = noise(1, HEADS, DIM)
    vectors[:, [3, 7]] = 400.0
    assert same(find_rope(None, turned(vectors, LAYOUTS[0], dtype), FREQUENCIES), LAYOUTS[0])


@EVERY_DTYPE
def test_without_rotation_there_are_no_bands(dtype: torch.dtype) -> None:
    found = find_rope(None, noise(1, HEADS, DIM).to(dtype).repeat(len(POSITIONS), 1, 1), FREQUENCIES)
    assert found is not None
    assert found.num_bands == 0


@EVERY_DTYPE
def test_positions_that_are_added_are_no_rotation(dtype: torch.dtype) -> None:
    keys = noise(1, HEADS, DIM) + noise(2, len(POSITIONS), 1, DIM)
    assert find_rope(None, keys.to(dtype), FREQUENCIES) is None


def test_frequencies_that_are_not_among_the_candidates_are_not_guessed() -> None:
    layout = LAYOUTS[0]
    keys = turned(noise(1, HEADS, DIM), layout)
    assert find_rope(None, keys, [layout.inv_freq * 1.01]) is None
    assert find_rope(None, keys, []) is None


def test_more_bands_than_a_head_has_are_passed_over() -> None:
    wide = 10_000.0 ** -(torch.arange(DIM, dtype=torch.float64) / DIM)
    assert same(find_rope(None, turned(noise(1, HEADS, DIM), LAYOUTS[0]), [wide, *FREQUENCIES]), LAYOUTS[0])


def test_a_token_is_fed_that_is_not_zero() -> None:
    embeddings = torch.zeros(5, 4, dtype=torch.bfloat16)
    embeddings[1], embeddings[3] = 0.5, -2.0
    assert loudest(embeddings) == 3
