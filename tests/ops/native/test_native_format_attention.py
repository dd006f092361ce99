"""Attention of the native kernels over every format and over latent caches, against its definition over what
gather_tokens returns: before and after compaction, alone and in company."""

from __future__ import annotations

from collections.abc import Iterator

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
from paged_oracle import Ask, Shape, under

from kvreclaim.ops import native
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.formats import FORMATS

ISAS = native.supported_isas()
WIDE = tuple(isa for isa in ISAS if isa in (ISAS[0], "avx2"))
LATENT = SHAPES["latent"]
DEEPSEEK = Shape(kv_heads=1, group=16, dim=576, v_dim=512, latent=True)
SPLIT = Shape(kv_heads=1, group=4, dim=64)
INTEGER_SLACK = 2e-4
"""16-bit queries over int8 and int4: queries and probabilities of 15 bits, in units of the largest value."""


def each_isa(names: tuple[str, ...] = NAMES, narrow: tuple[str, ...] = ("int8", "int4")):
    """Every format on the best instruction set and on AVX2, a few on the others."""
    pairs = [(isa, name) for isa in ISAS for name in names if isa in WIDE or name in narrow]
    params = [pytest.param(isa, name, id=f"{isa}-{name}") for isa, name in pairs]
    return pytest.mark.parametrize(("isa", "name"), params)


@pytest.fixture(autouse=True)
def _isa(request: pytest.FixtureRequest) -> Iterator[None]:
    native.force_isa(request.node.callspec.params.get("isa", ISAS[0]))
    yield
    native.force_isa(ISAS[0])


def rig_of(name: str, dtype: torch.dtype = torch.float32) -> Rig:
    integers = name in ("int8", "int4", "int8+int4") and dtype != torch.float32
    return Rig(native, FORMATS[name], dtype, slack=INTEGER_SLACK if integers else 0.0)


@each_isa()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape(isa: str, name: str, shape: Shape) -> None:
    rig = rig_of(name)
    w = fill(rig, shape, KINDS["mixed"])
    check_attention(rig, w)
    check_column_sums(rig, w)


@each_isa()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_numbers_and_scores(isa: str, name: str, shape: Shape) -> None:
    rig, asks = rig_of(name), [Ask(1, 53), Ask(1, 17), Ask(1, 1)]
    w = fill(rig, shape, asks)
    check_written(rig, w)
    for ask in range(len(asks)):
        check_scores(rig, w, ask, style="interleaved" if ask else "half")


@each_isa()
@pytest.mark.parametrize("shape", [SMALL, SPLIT, SHAPES["d24 v40 g7"]], ids=["d32", "d64", "d24"])
def test_queries_of_16_bits(isa: str, name: str, shape: Shape) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        rig = rig_of(name, dtype)
        w = fill(rig, shape, KINDS["decode"] + KINDS["chunks"])
        check_written(rig, w)
        check_attention(rig, w)


@each_isa(("fp16", "int8", "int4"), narrow=())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_kind_of_softmax(isa: str, name: str, dtype: torch.dtype) -> None:
    rig = rig_of(name, dtype)
    w = fill(rig, SMALL, relocated(SMALL))
    for how in HOW.values():
        check_attention(rig, w, **how)
        if dtype == torch.float32:
            check_column_sums(rig, w, **how)


@each_isa(("int8", "int4", "turboquant4", "int8+int4"), narrow=())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_keys_that_are_split_over_items(isa: str, name: str, dtype: torch.dtype) -> None:
    """Sequences of more slots than one item of work takes, beside short ones."""
    rig = rig_of(name, dtype)
    check_attention(rig, fill(rig, SPLIT, [Ask(1, 1100), Ask(1, 30), Ask(2, 700)]))


@pytest.mark.parametrize("name", NAMES)
def test_latent_caches_as_wide_as_deepseeks(name: str) -> None:
    rig = rig_of(name)
    w = fill(rig, DEEPSEEK, [Ask(1, 70), Ask(3, 3)])
    check_written(rig, w)
    check_attention(rig, w)
    check_column_sums(rig, w)


@each_isa(narrow=())
@pytest.mark.parametrize("shape", [SMALL, LATENT], ids=["small", "latent"])
@pytest.mark.parametrize(("tokens", "kept"), [(70, 33), (64, 16)])
def test_compaction(isa: str, name: str, shape: Shape, tokens: int, kept: int) -> None:
    check_compact(rig_of(name), shape, tokens, kept, in_place=kept != 16)


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_cells(name: str) -> None:
    check_copy_blocks(rig_of(name), SMALL, 41)
    check_copies_at_once(rig_of(name), SMALL, 41)
    check_cells(rig_of(name), SMALL, 53)


@each_isa(("fp32", "bf16", "int8", "int4", "fp8_e4m3"), narrow=())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_depends_on_no_neighbour_and_no_thread(isa: str, name: str, dtype: torch.dtype) -> None:
    """Bit for bit: each sequence alone, and all on one thread and on two."""
    w = fill(rig_of(name, dtype), SPLIT, [Ask(1, 600), Ask(1, 33), Ask(4, 70), Ask(1, 16)])
    threads = torch.get_num_threads()
    outputs = []
    for count in (1, 2):
        torch.set_num_threads(count)
        outputs.append(attend(w, w.batch.sequences, w.q[0]))
    torch.set_num_threads(threads)
    assert torch.equal(*outputs)
    first = 0
    for slots in w.batch.sequences:
        rows = slice(first, first + slots.query_len)
        assert torch.equal(attend(w, (slots,), w.q[0, rows]), outputs[0][rows])
        first = rows.stop


def attend(w, sequences, q: torch.Tensor) -> torch.Tensor:
    batch = AttentionBatch.build(tuple(sequences), w.shape.block_size, torch.device("cpu"))
    return native.paged_attention(q, under(w.cache, 0, scale=w.shape.dim**-0.5), batch)
