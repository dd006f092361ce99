"""A paged cache full of NaN with a few sequences in it, and attention once more: float64, row by row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvreclaim.ops import reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.kv_cache import KVCache, LayerCache
from kvreclaim.ops.reference import paged_attention

TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-4, "rtol": 2**-8},
}
"""The inputs are the same numbers for op and oracle: what is left is fp32 sums and one rounding."""


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
HOW = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "window": {"window": 7},
    "sinks": {"sinks": torch.linspace(-2, 3, 4)},
    "softcap+window": {"softcap": 1.5, "window": 7},
    "sinks+window": {"sinks": torch.linspace(-2, 3, 4), "window": 7},
    "softcap+sinks": {"softcap": 1.5, "sinks": torch.linspace(-2, 3, 4)},
    "scale": {"scale": 1.7},
    "scale+softcap": {"scale": 0.7, "softcap": 1.5},
    "scale+sinks": {"scale": 0.7, "sinks": torch.linspace(-2, 3, 4)},
}
ALL_HOW = pytest.mark.parametrize("how", HOW.values(), ids=HOW.keys())


@dataclass(frozen=True, slots=True)
class Shape:
    """G query heads read each of the K KV heads; latent: a key begins with its value."""

    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    v_dim: int = 0
    block_size: int = 16
    layers: int = 1
    dtype: torch.dtype = torch.float32
    latent: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One sequence of a batch. slot_positions [L, K, slots] as in SequenceSlots;
    spare: blocks in its table beyond the ones that it needs."""

    query_len: int
    seq_len: int
    shift: int = 0
    slot_positions: Tensor | None = None
    spare: int = 0


@dataclass(slots=True, eq=False)
class World:
    """q: [L, T, H, D] of all asks in order; keys, values: per ask [L, K, seq_len, D], as in the cache."""

    shape: Shape
    asks: list[Ask]
    cache: KVCache
    q: Tensor
    batch: AttentionBatch
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def noise(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def empty_cache(shape: Shape, num_blocks: int) -> KVCache:
    facts = LayerFacts(shape.heads, shape.kv_heads, shape.dim, shape.v_dim or shape.dim, Softmax(1.0))
    cache = reference.allocate(
        (facts,) * shape.layers, num_blocks, shape.block_size, like=torch.empty(0, dtype=shape.dtype)
    )
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    return cache


def world(shape: Shape, asks: list[Ask], seed: int = 0) -> World:
    """Each sequence in blocks of its own, in random order; all others, block 0 among them, are NaN."""
    needed = [-(-ask.seq_len // shape.block_size) + ask.spare for ask in asks]
    cache = empty_cache(shape, sum(needed) + 3)
    order = 1 + np.random.default_rng(seed).permutation(cache.num_blocks - 1)
    tables = np.split(order, np.cumsum(needed))[: len(asks)]
    keys, values, slots = [], [], []
    for index, (ask, table) in enumerate(zip(asks, tables, strict=True)):
        at = (shape.layers, shape.kv_heads, ask.seq_len)
        keys.append(noise(seed + 10 * index + 1, *at, shape.dim, dtype=shape.dtype))
        values.append(noise(seed + 10 * index + 2, *at, shape.v_dim or shape.dim, dtype=shape.dtype))
        put(cache, table.tolist(), keys[-1], values[-1])
        slots.append(
            SequenceSlots(table, ask.query_len, ask.seq_len, ask.shift, slot_positions=ask.slot_positions)
        )
    batch = AttentionBatch.build(tuple(slots), shape.block_size, torch.device("cpu"))
    num_tokens = sum(ask.query_len for ask in asks)
    q = noise(seed + 7, shape.layers, num_tokens, shape.heads, shape.dim, dtype=shape.dtype)
    return World(shape, asks, cache, q, batch, keys, values)


def put(cache: KVCache, table: list[int], k: Tensor, v: Tensor) -> None:
    """Lay k and v [L, K, T, D] into a table's blocks, slot by slot, zeros behind them."""
    for store, x in ((cache.k, k), (cache.v, v)):
        store[:, table] = 0
        for slot in range(x.shape[2]):
            store[:, table[slot // cache.block_size], :, slot % cache.block_size] = x[:, :, slot]


def under(cache: KVCache, layer: int, **softmax) -> LayerCache:
    """A layer of the cache whose logits become weights in this way."""
    own = cache.layers[layer]
    return replace(own, softmax=Softmax(keys=own.softmax.keys, **softmax))


def attend(w: World, layer: int = 0, **how) -> Tensor:
    return paged_attention(w.q[layer], under(w.cache, layer, **{"scale": w.shape.dim**-0.5, **how}), w.batch)


def expected(w: World, layer: int = 0, *, sinks: Tensor | None = None, **how) -> Tensor:
    """[T, H, Dv] float64: each row by the definition."""
    rows = []
    first = 0
    for ask, k, v in zip(w.asks, w.keys, w.values, strict=True):
        for i in range(ask.query_len):
            slot = ask.seq_len - ask.query_len + i
            for head in range(w.shape.heads):
                kv_head = head // w.shape.group
                seen = [
                    s for s in range(slot + 1) if is_seen(ask, layer, kv_head, s, slot, how.get("window"))
                ]
                query = w.q[layer, first + i, head]
                sink = None if sinks is None else sinks[head].item()
                scale, softcap = how.get("scale", w.shape.dim**-0.5), how.get("softcap")
                rows.append(
                    one_row(query, k[layer, kv_head, seen], v[layer, kv_head, seen], scale, softcap, sink)
                )
        first += ask.query_len
    return torch.stack(rows).view(first, w.shape.heads, -1)


def is_seen(ask: Ask, layer: int, kv_head: int, slot: int, query_slot: int, window: int | None) -> bool:
    """Whether the query in query_slot attends to an earlier (or its own) slot."""
    position = slot + ask.shift
    if ask.slot_positions is not None and slot < ask.slot_positions.shape[-1]:
        position = int(ask.slot_positions[layer, kv_head, slot])
    return window is None or query_slot + ask.shift - position < window


def one_row(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None = None, sink: float | None = None
) -> Tensor:
    """q [D], k and v [seen, D] -> [Dv] float64; zero where nothing is seen."""
    scores = (k.double() @ q.double()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp()
    total = weights.sum() + (0.0 if sink is None else np.exp(sink))
    return (weights[:, None] * v.double()).sum(0) / total.clamp_min(1e-300)


def assert_equal(got: Tensor, want: Tensor) -> None:
    """Within the tolerance of got's dtype; a NaN is a failure."""
    torch.testing.assert_close(got.double(), want.double(), **TOLERANCE[got.dtype])
