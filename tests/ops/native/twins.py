"""The same sequences in a native cache and in a reference cache, everything else in both NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paged_oracle
import torch
from paged_oracle import Ask, noise, under
from torch import Tensor

from kvreclaim.ops import native, reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Shape(paged_oracle.Shape):
    """Sizes that a row of vector registers does not hold."""

    group: int = 4
    dim: int = 64

    @property
    def value_dim(self) -> int:
        return self.v_dim or self.dim

    def facts(self) -> tuple[LayerFacts, ...]:
        return (LayerFacts(self.heads, self.kv_heads, self.dim, self.value_dim, Softmax(1.0)),) * self.layers


SHAPES = [
    Shape(kv_heads=1, group=1, dim=32),
    Shape(kv_heads=2, group=4, dim=64),
    Shape(kv_heads=1, group=8, dim=80),
    Shape(kv_heads=3, group=2, dim=96, block_size=32),
    Shape(kv_heads=2, group=3, dim=128, block_size=48),
    Shape(kv_heads=1, group=7, dim=256),
    Shape(kv_heads=2, group=17, dim=64, v_dim=32),
    Shape(kv_heads=2, group=5, dim=40, v_dim=136),
    Shape(kv_heads=1, group=2, dim=8),
]
LENGTHS = {
    "edges": [(1, n) for n in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)],
    "long": [(1, 511), (1, 512), (1, 513), (1, 1500), (3, 1030)],
    "prefill": [(n, n) for n in (1, 2, 3, 15, 16, 17, 40, 70)],
    "chunks": [(1, 40), (2, 17), (7, 8), (8, 24), (9, 33), (40, 600)],
    "empty": [(0, 0), (1, 3), (0, 0), (0, 20), (5, 5), (0, 0)],
}
HOW = {
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-2, 3, 8)},
    "strong sinks": {"sinks": torch.linspace(60, 300, 8)},
    "window": {"window": 7},
    "wide window": {"window": 90},
    "all": {"softcap": 4.0, "sinks": torch.linspace(-2, 3, 8), "window": 20, "scale": 0.7},
    "one slot takes all": {"scale": 1e5},
}


def asks(kind: str) -> list[Ask]:
    return [Ask(*lengths) for lengths in LENGTHS[kind]]


@dataclass(frozen=True, slots=True, eq=False)
class Twins:
    """q: [T, H, D]; keys and values: per ask [T, K, D]."""

    shape: Shape
    reference: KVCache
    native: KVCache
    batch: AttentionBatch
    q: Tensor


def nan_cache(module: object, shape: Shape, num_blocks: int) -> KVCache:
    cache = module.allocate(
        shape.facts(), num_blocks, shape.block_size, like=torch.empty(0, dtype=shape.dtype)
    )
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    return cache


def random_tables(asks: list[Ask], block_size: int, seed: int) -> tuple[list[np.ndarray], int]:
    """Each ask's blocks in random order, and the number of blocks of a cache with some to spare."""
    needed = [-(-ask.seq_len // block_size) for ask in asks]
    order = np.random.default_rng(seed).permutation(sum(needed) + 3).astype(np.int32)
    return [table.copy() for table in np.split(order, np.cumsum(needed))[: len(asks)]], len(order)


def twins(shape: Shape, asks: list[Ask], seed: int = 0) -> Twins:
    tables, num_blocks = random_tables(asks, shape.block_size, seed)
    caches = nan_cache(reference, shape, num_blocks), nan_cache(native, shape, num_blocks)
    sequences = []
    for index, (ask, table) in enumerate(zip(asks, tables, strict=True)):
        whole = AttentionBatch.build(
            (SequenceSlots(table, ask.seq_len, ask.seq_len),), shape.block_size, torch.device("cpu")
        )
        for layer in range(shape.layers):
            at = (ask.seq_len, shape.kv_heads)
            k = noise(seed + 100 * index + 2 * layer, *at, shape.dim, dtype=shape.dtype)
            v = noise(seed + 100 * index + 2 * layer + 1, *at, shape.value_dim, dtype=shape.dtype)
            reference.write_kv(caches[0].layers[layer], k, v, whole.slot_mapping)
            native.write_kv(caches[1].layers[layer], k, v, whole.slot_mapping)
        sequences.append(
            SequenceSlots(table, ask.query_len, ask.seq_len, ask.shift, slot_positions=ask.slot_positions)
        )
    # The reference multiplies a masked slot's value by zero, so its unused slots must be finite.
    caches[0].k.nan_to_num_(0.0)
    caches[0].v.nan_to_num_(0.0)
    batch = AttentionBatch.build(tuple(sequences), shape.block_size, torch.device("cpu"))
    q = noise(seed + 7, batch.slot_mapping.numel(), shape.heads, shape.dim, dtype=shape.dtype)
    return Twins(shape, *caches, batch, q)


def attend_both(w: Twins, layer: int = 0, *, q: Tensor | None = None, **how: object) -> tuple[Tensor, Tensor]:
    """(native, reference) outputs [T, H, Dv]."""
    q = w.q if q is None else q
    how = {"scale": w.shape.dim**-0.5, **how}
    # The reference takes no sequence without queries; they have no rows in q.
    queried = tuple(seq for seq in w.batch.sequences if seq.query_len)
    batch = AttentionBatch(queried, w.batch.slot_mapping, w.batch.block_size)
    want = reference.paged_attention(q, under(w.reference, layer, **how), batch)
    return native.paged_attention(q, under(w.native, layer, **how), w.batch), want
