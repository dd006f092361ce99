"""The reference ops over every format and over latent caches, against fp64 over what they gather."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from format_cases import (
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
    check_copies_at_once,
    check_copy_blocks,
    check_scores,
    check_written,
    fill,
    relocated,
)
from paged_oracle import Ask

from kvreclaim.ops import reference
from kvreclaim.ops.formats import FORMATS

LATENT = SHAPES["latent"]
DEEPSEEK = replace(LATENT, group=16, dim=576, v_dim=512)


@pytest.fixture(params=NAMES)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(reference, FORMATS[request.param])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape(rig: Rig, shape) -> None:
    w = fill(rig, shape, KINDS["mixed"])
    check_written(rig, w)
    check_attention(rig, w)
    check_column_sums(rig, w)
    check_scores(rig, w)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_batch(rig: Rig, kind: str) -> None:
    w = fill(rig, SMALL, KINDS[kind], chunk=9)
    check_written(rig, w)
    check_attention(rig, w)


def test_every_kind_of_softmax(rig: Rig) -> None:
    w = fill(rig, SMALL, relocated(SMALL))
    for how in HOW.values():
        check_attention(rig, w, **how)
        check_column_sums(rig, w, **how)


@pytest.mark.parametrize("shape", [SMALL, LATENT], ids=["small", "latent"])
@pytest.mark.parametrize(("tokens", "kept"), [(70, 33), (64, 16), (33, 1), (40, 40)])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "elsewhere"])
def test_compaction(rig: Rig, shape, tokens: int, kept: int, in_place: bool) -> None:
    check_compact(rig, shape, tokens, kept, in_place=in_place)


@pytest.mark.parametrize("tokens", [16, 41])
def test_copies(rig: Rig, tokens: int) -> None:
    check_copy_blocks(rig, SMALL, tokens)
    check_copies_at_once(rig, SMALL, tokens)


def test_cells(rig: Rig) -> None:
    check_cells(rig, SMALL, 53)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_queries_of_16_bits(rig: Rig, dtype: torch.dtype) -> None:
    w = fill(Rig(reference, rig.fmt, dtype), SMALL, KINDS["mixed"])
    check_written(rig, w)
    check_attention(Rig(reference, rig.fmt, dtype), w)


def test_latent_caches_as_wide_as_deepseeks() -> None:
    for name in ("bf16", "int8", "int4"):
        rig = Rig(reference, FORMATS[name])
        w = fill(rig, DEEPSEEK, [Ask(1, 20), Ask(3, 3)])
        check_written(rig, w)
        check_attention(rig, w)


def test_any_block_size(rig: Rig) -> None:
    for size in (1, 5):
        w = fill(rig, type(SMALL)(kv_heads=2, group=1, dim=6, v_dim=10, block_size=size), [Ask(3, 11)])
        check_written(rig, w)
        check_attention(rig, w)
