"""Every format and latent caches on Triton's kernels: each op against its definition over what gather_tokens
returns. The interpreter is slow at writes, so most caches here are filled by the reference, whose planes are
the same; test_writes compares the bytes of both."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from format_cases import (
    CODED,
    HOW,
    SHAPES,
    SMALL,
    Rig,
    check_attention,
    check_cells,
    check_compact,
    check_copies_at_once,
    check_copy_blocks,
    check_scores,
    check_written,
    fill,
    relocated,
)
from paged_oracle import Ask, Shape, expected, noise, under
from transformed_rig import Transformed
from triton_pair import DEVICE

from kvreclaim.ops import reference
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.triton import support

LATENT = SHAPES["latent"]
ONE = Shape(kv_heads=2, group=2, dim=32)
FEW = [Ask(1, 35), Ask(4, 18), Ask(0, 5)]
CODED_FORMATS = pytest.mark.parametrize("name", CODED)
ODD = ("d24 v40 g7", "d32 g2", "d80 v40 g3 s32", "latent")
BOTH = pytest.mark.parametrize("shape", [SMALL, LATENT], ids=["small", "latent"])


def rig_of(name: str, dtype: torch.dtype = torch.float32) -> Rig:
    """Compiled kernels round the operands of products to 16-bit queries' dtype; the interpreter does not."""
    filled = SimpleNamespace(**{**vars(kernels), "write_kv": reference.write_kv})
    slack = 4 * torch.finfo(dtype).eps if support.keeps_16_bits(dtype) else 0.0
    return Rig(filled, FORMATS[name], dtype, DEVICE, slack)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for shape in SHAPES for name in (CODED if shape in ODD else ("int4", "turboquant4"))],
)
def test_every_shape(name: str, shape: str) -> None:
    rig = rig_of(name)
    w = fill(rig, SHAPES[shape], FEW)
    check_written(rig, w)
    check_attention(rig, w)
    check_scores(rig, w, style="interleaved" if w.shape.group % 2 else "half")


@CODED_FORMATS
def test_scores_of_wide_keys(name: str) -> None:
    """More dims than kernels multiply at once."""
    rig = rig_of(name)
    check_scores(rig, fill(rig, Shape(kv_heads=2, group=2, dim=192, v_dim=40, layers=2), FEW[:1]))


@CODED_FORMATS
def test_transformed_keys(name: str) -> None:
    plain = rig_of(name)
    rig = replace(plain, backend=Transformed(plain.backend))
    w = fill(rig, ONE, FEW)
    check_attention(rig, w)
    check_scores(rig, w)
    check_cells(rig, ONE, 50)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_latent_numbers(name: str) -> None:
    rig = Rig(kernels, FORMATS[name], torch.float32, DEVICE)
    w = fill(rig, LATENT, FEW)
    check_written(rig, w)
    check_attention(rig, w)
    check_scores(rig, w)


@pytest.mark.parametrize("group", [17, 40])
def test_more_query_heads_than_rows_of_a_tile(group: int) -> None:
    """They take several tiles; the last one is not full."""
    shape = Shape(kv_heads=1, group=group, dim=24, v_dim=16, latent=True)
    rig = rig_of("int8")
    check_attention(rig, fill(rig, shape, [Ask(1, 35), Ask(3, 20)]), sinks=True)


@CODED_FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_queries_of_16_bits(name: str, dtype: torch.dtype) -> None:
    rig = rig_of(name, dtype)
    check_attention(rig, fill(rig, ONE, FEW[:2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_queries_of_another_dtype_than_the_cache(name: str, dtype: torch.dtype) -> None:
    rig = rig_of(name, dtype)
    check_attention(rig, fill(rig, ONE, FEW[:2]))


@pytest.mark.parametrize(("name", "how"), [*zip(CODED, [*HOW, "sinks+window"], strict=True)])
def test_every_kind_of_softmax(name: str, how: str) -> None:
    rig = rig_of(name)
    check_attention(rig, fill(rig, ONE, [relocated(ONE)[0], relocated(ONE)[2]]), **HOW[how])


@pytest.mark.parametrize("name", ["int8", "turboquant4"])
def test_long_sequences_are_split(name: str) -> None:
    rig = rig_of(name)
    shape = Shape(kv_heads=1, group=2, dim=32)
    check_attention(rig, fill(rig, shape, [Ask(1, 520)]), sinks=True)


@CODED_FORMATS
def test_one_set_of_tables_serves_step_after_step(name: str) -> None:
    """Tensors of a fixed size whose values change, as a replayed graph reads them; empty rows are zero."""
    rig, shape = rig_of(name), Shape(kv_heads=1, group=4, dim=32)
    table = torch.zeros(3, 4, dtype=torch.int32, device=DEVICE)
    lengths, shifts = (torch.zeros(3, dtype=torch.int32, device=DEVICE) for _ in range(2))
    tables = kernels.static_tables(table, lengths, shifts, num_kv_heads=1, max_seq_len=64)
    for seed, used in enumerate(([33, 1, 17], [5], [16, 40])):
        w = fill(rig, shape, [Ask(1, n) for n in used], seed)
        arrays, n = w.batch.arrays, len(used)
        table.fill_(1)
        table[:n, : arrays.block_table.shape[1]] = arrays.block_table.to(DEVICE)
        lengths.zero_()[:n] = arrays.seq_lens.to(DEVICE)
        q = torch.ones(3, shape.heads, shape.dim, device=DEVICE)
        q[:n] = w.q[0].to(DEVICE)
        got = kernels.decode_attention(q, under(w.cache, 0, scale=0.25), tables)
        want = expected(w, scale=0.25)
        torch.testing.assert_close(got[:n].cpu().double(), want, rtol=1e-5, atol=1e-4)
        assert not got[n:].any()


def planes_of(name: str, shape: Shape, num_blocks: int) -> tuple[KVCache, KVCache]:
    """Random bytes for the kernels, and the same for the reference."""
    w = fill(Rig(reference, FORMATS[name]), shape, [Ask(0, 0, spare=num_blocks)])
    planes = tuple(plane.clone().to(DEVICE) for plane in w.cache.planes)
    return replace(w.cache, planes=planes), w.cache


@BOTH
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=["from fp32", "from bf16"])
@CODED_FORMATS
def test_writes(name: str, given: torch.dtype, shape: Shape) -> None:
    """The bytes of the codecs, at these slots only: zeros, equal and huge numbers, NaN; a negative slot."""
    ours, plain = planes_of(name, shape, 3)
    v = (noise(2, shape.kv_heads, 12, shape.v_dim or shape.dim) * 3).to(given).transpose(0, 1)
    k = noise(1, 12, shape.kv_heads, 2 * shape.dim, dtype=given)[..., ::2]
    if shape.latent:
        k = torch.cat((v, k[..., v.shape[-1] :]), -1)
    for x in (k, v):
        x[0], x[1], x[2], x[3] = 0, -3.5, x[2] * 1e4, x[3] * 1e-5
        x[4, 0, -1], x[5, 0, -2] = torch.nan, torch.inf
    slots = torch.randperm(3 * 16, generator=torch.Generator().manual_seed(3))[:12]
    slots[7] = -1
    real = slots >= 0
    for layer in range(shape.layers):
        reference.write_kv(plain.layers[layer], k[real], v[real], slots[real])
        kernels.write_kv(ours.layers[layer], *(x.to(DEVICE) for x in (k, v, slots)))
    for x, y in zip(ours.planes, plain.planes, strict=True):
        assert torch.equal(x.cpu(), y)


@BOTH
@CODED_FORMATS
def test_compaction(name: str, shape: Shape) -> None:
    check_compact(rig_of(name), shape, 35, 19, in_place=shape is SMALL)


@CODED_FORMATS
def test_copies(name: str) -> None:
    check_copy_blocks(rig_of(name), ONE, 25)
    check_copies_at_once(rig_of(name), ONE, 25)


@CODED_FORMATS
def test_cells(name: str) -> None:
    check_cells(rig_of(name), Shape(kv_heads=2, group=1, dim=32, layers=2), 37)


def test_blocks_of_any_size() -> None:
    """Also of sizes that no tile is a multiple of."""
    rig = rig_of("int4")
    for size in (5, 24):
        w = fill(rig, Shape(kv_heads=2, group=1, dim=6, v_dim=10, block_size=size), [Ask(3, 49)])
        check_written(rig, w)
        check_attention(rig, w)
        check_scores(rig, w)
