"""Blocks of several makes, read in token order and compacted: against copies kept beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_caches import WRITERS, B, Book, D, K, L, S, make_layers, paired_writer, plain_writer

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.worker.layer_cache import VllmLayerCache
from kvreclaim.integrations.vllm.worker.layouts import CacheViews, PackedLayout, StridedLayout


@pytest.mark.parametrize("make", WRITERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_order_is_found_and_proved(make: str, dtype: torch.dtype) -> None:
    layers = make_layers(make, dtype)
    before = [layer.cache.clone() for layer in layers]
    views = CacheViews(layers, B)
    views.prove()
    for layer, cache in zip(layers, before, strict=True):
        assert torch.equal(layer.cache, cache)
    kind = PackedLayout if make == "paired" else StridedLayout
    assert all(isinstance(layout, kind) for layout in views.layouts)
    Book.write(layers, (5, 2, 7), 19).check(views, (5, 2, 7))


@pytest.mark.parametrize("make", WRITERS)
@pytest.mark.parametrize("target", [(5, 2), (2, 5), (7, 4), (3, 8)], ids=str)
def test_survivors_move_and_nothing_else(make: str, target: tuple[int, ...]) -> None:
    """Targets may be sources, in any order."""
    layers = make_layers(make)
    views = CacheViews(layers, B)
    book, source = Book.write(layers, (5, 2, 7, 4), 27), (5, 2, 7, 4)
    others = {
        block: [layer.cache[block].clone() for layer in layers] for block in range(B) if block not in target
    }
    kept = torch.stack(
        [torch.stack([torch.randperm(27)[:13].sort().values for _ in range(K)]) for _ in range(L)]
    )
    views.compact(kept, views.block_ids(source), views.block_ids(target))
    book.keep(kept)
    book.check(views, target)
    for block, before in others.items():
        assert all(torch.equal(layer.cache[block], x) for layer, x in zip(layers, before, strict=True))


def test_kernel_blocks_are_parts_of_table_blocks() -> None:
    """The backend counts blocks of S slots, the tables blocks of 3 S."""
    layers = make_layers("plain")
    views = CacheViews(layers, B // 3)
    assert views.block_size == 3 * S
    views.prove()
    book = Book.write(layers, (6, 7, 8, 0, 1, 2), 40)
    book.check(views, (2, 0))
    kept = torch.arange(0, 40, 2)[None, None]
    views.compact(kept, views.block_ids((2, 0)), views.block_ids((1,)))
    book.keep(kept)
    book.check(views, (1,))


def test_fp8_is_moved_as_bytes_and_read_with_its_scale() -> None:
    scale = torch.tensor([0.5, 0.03125])

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        rows = [(keys / scale[:, None]), values / 2.0]
        plain_writer(cache)(*(x.to(torch.float8_e4m3fn).view(torch.uint8) for x in rows), slots)

    cache = torch.zeros(B, K, S, 2 * D, dtype=torch.uint8)
    layer = VllmLayerCache("fp8", cache, D, torch.float8_e4m3fn, torch.bfloat16, scale, 2.0, write, False)
    views = CacheViews([layer], B)
    views.prove()
    keys, values = (torch.randn(11, K, D) for _ in range(2))
    layer.write(keys, values, torch.arange(11) + 3 * S)
    ids = views.block_ids((3, 4))
    want = (keys / scale[:, None]).to(torch.float8_e4m3fn).float() * scale[:, None]
    assert torch.equal(views.read(0, ids, 11, 0), want.transpose(0, 1))
    assert torch.equal(
        views.read(0, ids, 11, 1), ((values / 2).to(torch.float8_e4m3fn).float() * 2).transpose(0, 1)
    )
    kept = torch.tensor([[[1, 4, 9]]])
    views.compact(kept, ids, views.block_ids((4,)))
    assert torch.equal(views.read(0, views.block_ids((4,)), 3, 0), want.transpose(0, 1)[:, kept[0, 0]])


def test_an_unknown_order_is_refused() -> None:
    def scrambling(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        plain_writer(layer.cache)(keys.flip(1), values, slots)  # the heads in each other's place

    def losing(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        paired_writer(lost.cache)(keys, keys, slots)

    layer = replace(make_layers("plain")[0], write=scrambling)
    with pytest.raises(UnsupportedModelError, match="not where kvreclaim reads it"):
        CacheViews([layer], B).prove()
    lost = replace(make_layers("paired")[0], write=losing)
    with pytest.raises(UnsupportedModelError, match="could not be learned"):
        CacheViews([lost], B)
    with pytest.raises(UnsupportedModelError, match=r"\[9\] blocks for a pool of 4"):
        CacheViews(make_layers("plain"), 4)
