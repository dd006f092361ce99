"""Every format and latent caches on Triton's kernels: each op against its definition over what gather_tokens
returns."""

from __future__ import annotations

import pytest
import torch
from format_cases import (
    CODED,
    HOW,
    KINDS,
    NAMES,
    SHAPES,
    SMALL,
    Rig,
    check_attention,
    check_cells,
    check_column_sums,
    check_compact,
    check_copy_blocks,
    check_scores,
    check_written,
    fill,
    masked,
    relocated,
)
from paged_oracle import Ask, Shape
from triton_pair import DEVICE

from kvreclaim.ops import triton as kernels
from kvreclaim.ops.formats import FORMATS

ALL_FORMATS = pytest.mark.parametrize("name", NAMES)
CODED_FORMATS = pytest.mark.parametrize("name", CODED)
ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
LATENT = SHAPES["latent"]


def rig_of(name: str, dtype: torch.dtype = torch.float32) -> Rig:
    return Rig(kernels, FORMATS[name], dtype, DEVICE)


@ALL_FORMATS
@ALL_SHAPES
def test_every_shape(name: str, shape: Shape) -> None:
    rig = rig_of(name)
    w = fill(rig, shape, KINDS["mixed"], chunk=33)
    check_written(rig, w)
    check_attention(rig, w)
    check_scores(rig, w, style="interleaved" if shape.group % 2 else "half")


@CODED_FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", [SMALL, LATENT], ids=["small", "latent"])
def test_queries_of_16_bits(name: str, dtype: torch.dtype, shape: Shape) -> None:
    rig = rig_of(name, dtype)
    check_attention(rig, fill(rig, shape, KINDS["chunks"]))


@CODED_FORMATS
@pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())
def test_every_kind_of_softmax(name: str, how: dict) -> None:
    rig = rig_of(name)
    check_attention(rig, fill(rig, SMALL, [Ask(1, 70), Ask(5, 38)]), **how)
