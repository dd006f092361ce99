"""What only a GPU can show: compiled kernels at sizes the interpreter cannot reach, and real graphs.

Run with TRITON_INTERPRET=0, which runs all tests of this directory on the GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from format_cases import CODED, SHAPES, Rig, check_attention, check_scores, check_written, fill
from format_fill import read
from paged_oracle import Ask, Shape, expected, under, world
from triton_pair import DEVICE, DTYPES, assert_close, attend_both, make_pair

from kvreclaim.ops import reference
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.kv_cache import KVCache

pytestmark = pytest.mark.gpu


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [
        Shape(kv_heads=8, group=4, dim=128),
        Shape(kv_heads=2, group=8, dim=64),
        Shape(kv_heads=4, group=2, dim=256),
    ],
    ids=["128", "64", "256"],
)
def test_long_contexts(shape: Shape, dtype: torch.dtype) -> None:
    batch = [Ask(1, 9000), Ask(300, 2500), Ask(1, 1), Ask(1, 4097), Ask(700, 700)]
    assert_close(*attend_both(world(replace(shape, dtype=dtype), batch)))


@DTYPES
def test_compaction_of_many_heads(dtype: torch.dtype) -> None:
    """Compaction in place and through the room, with more heads than multiprocessors."""
    pair = make_pair(Shape(kv_heads=8, dim=128, layers=24, dtype=dtype), 3000)
    order = torch.rand(24, 8, 3000).argsort(-1)[..., :2048].sort(-1).values
    for target in (pair.block_ids[:128], pair.block_ids.flip(0)[:128]):
        ours = make_pair(Shape(kv_heads=8, dim=128, layers=24, dtype=dtype), 3000)
        reference.compact(ours.reference, order, ours.block_ids, target)
        kernels.compact(ours.kernel, order.cuda(), ours.device_ids, target.cuda())
        for x, y in ((ours.kernel.k, ours.reference.k), (ours.kernel.v, ours.reference.v)):
            assert torch.equal(x[:, target.cuda()].cpu(), y[:, target])


@DTYPES
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("shape", ["d128 g8", "d80 v40 g3 s32", "latent"])
def test_long_contexts_of_every_format(name: str, shape: str, dtype: torch.dtype) -> None:
    """Numbers rounded to 16 bits for the products of 16-bit queries: within a few of their steps."""
    slack = 0.0 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    rig = Rig(kernels, FORMATS[name], dtype, DEVICE, slack)
    w = fill(rig, SHAPES[shape], [Ask(1, 3000), Ask(40, 500), Ask(1, 1)], chunk=700)
    check_written(rig, w)
    check_attention(rig, w)
    check_scores(rig, w)


@pytest.mark.parametrize("name", CODED)
def test_writes_and_a_decode_captured_in_a_graph(name: str) -> None:
    """Both follow what lies in their tensors at the replay; rows without a slot write nothing."""
    rig = Rig(kernels, FORMATS[name], torch.float32, DEVICE)
    w = fill(rig, Shape(kv_heads=2, group=4, dim=64), [Ask(1, 700), Ask(1, 30)])
    arrays, cache, q = w.batch.arrays, w.cache, w.q[0].cuda()
    table, lengths, shifts = (x.cuda() for x in (arrays.block_table, arrays.seq_lens, arrays.shifts))
    k, v = torch.randn(2, 2, 2, 64, device=DEVICE)
    slots = torch.full((2,), -1, device=DEVICE)
    before = [plane.clone() for plane in cache.planes]
    layer = under(cache, 0, scale=0.125)

    def run() -> torch.Tensor:
        kernels.write_kv(layer, k, v, slots)
        tables = kernels.static_tables(table, lengths, shifts, num_kv_heads=2, max_seq_len=1024)
        return kernels.decode_attention(q, layer, tables)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(cache.planes, before, strict=True))
    torch.testing.assert_close(out.cpu().double(), expected(w, scale=0.125), rtol=1e-5, atol=1e-4)
    slots.copy_(w.batch.slot_mapping)
    graph.replay()
    read(rig, w)
    torch.testing.assert_close(out.cpu().double(), expected(w, scale=0.125), rtol=1e-5, atol=1e-4)


def test_a_decode_captured_in_a_graph_follows_its_tables() -> None:
    w = world(Shape(kv_heads=2, group=4, dim=64, dtype=torch.bfloat16), [Ask(1, 700), Ask(1, 30), Ask(1, 65)])
    arrays = w.batch.arrays
    table, lengths, shifts = (x.cuda() for x in (arrays.block_table, arrays.seq_lens, arrays.shifts))
    lengths.zero_()
    q, cache = w.q[0].cuda(), KVCache.plain(w.cache.k.cuda(), w.cache.v.cuda(), w.cache.softmaxes)

    def run() -> torch.Tensor:
        tables = kernels.static_tables(table, lengths, shifts, num_kv_heads=2, max_seq_len=1024)
        return kernels.decode_attention(q, under(cache, 0, scale=0.125), tables)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    assert not out.any()
    lengths.copy_(arrays.seq_lens)
    graph.replay()
    assert_close(out, reference.paged_attention(w.q[0], under(w.cache, 0, scale=0.125), w.batch))
