"""Codes of scales: rounded down, stable, exact powers of two where they should be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.ops.formats import scales
from kvreclaim.ops.formats.scales import ScaleCode

CODES = {name: getattr(scales, name) for name in ("INT8", "FP8", "TURBO", "INT4")}
EACH = pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
CPU = torch.device("cpu")


@EACH
def test_the_scale_of_a_code_has_that_code(code: ScaleCode) -> None:
    table = code.table(CPU)
    assert torch.equal(code.encode(table), torch.arange(code.last + 1, dtype=torch.int32))
    assert torch.equal(code.decode(torch.arange(code.last + 1)), table)


@EACH
def test_scales_are_powers_of_two_in_equal_steps(code: ScaleCode) -> None:
    for number in range(0, code.last + 1, 7):
        want = 2.0 ** (number / code.steps - code.bias)
        assert code.decode(torch.tensor(number)).item() == pytest.approx(want, rel=2e-7)
    octaves = torch.arange(0, code.last + 1, code.steps)
    assert code.decode(octaves).tolist() == [2.0 ** (i - code.bias) for i in range(len(octaves))]


@EACH
@given(exponent=st.floats(-20, 20))
def test_a_scale_is_rounded_down_by_less_than_a_step(code: ScaleCode, exponent: float) -> None:
    scale = torch.tensor(2.0**exponent)
    got = code.decode(code.encode(scale)).item()
    least, most = code.table(CPU)[[0, -1]].tolist()
    if scale < least:
        assert got == least
    elif scale > most * 2 ** (1 / code.steps):
        assert got == most
    else:
        assert got <= scale.item() * (1 + 1e-4 / code.steps * 16)
        assert got > scale.item() * 2 ** (-1 / code.steps) * (1 - 1e-6)


@EACH
def test_what_is_no_scale_has_a_code(code: ScaleCode) -> None:
    odd = torch.tensor([0.0, math.nan, math.inf, 1e-45, 3e38])
    assert code.encode(odd).tolist() == [0, 0, code.last, 0, code.last]


def test_fine_scales_are_products_of_two_short_tables() -> None:
    coarse, fine = (torch.tensor(part) for part in scales.sixteenths())
    codes = torch.arange(4096)
    products = coarse[codes >> 4 & 15] * fine[codes & 15] * torch.exp2((codes >> 8).float() - 13)
    assert torch.equal(products, scales.INT8.table(CPU))
    codes = torch.arange(256)
    assert torch.equal(coarse[codes & 15] * torch.exp2((codes >> 4).float() - 10), scales.INT4.table(CPU))
