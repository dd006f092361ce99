"""Caches of any back-end in any format, filled through write_kv with sequences in shuffled blocks.

What no token fills is NaN or random bytes. `written` says what gather_tokens has to return.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import torch
from paged_oracle import Ask, Shape, World, noise
from tolerances import TOLERANCES
from torch import Tensor

from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.formats.codecs import round_trip
from kvreclaim.ops.kv_cache import KVCache, PagedTokens

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Rig:
    """A back-end under test and a format.

    dtype: of queries and of the keys and values that are written
    slack: what the back-end may be off besides the tolerance of the dtype, in units of the largest value
    """

    backend: ModuleType
    fmt: KVFormat
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    slack: float = 0.0

    @property
    def tolerance(self) -> dict[str, float]:
        return TOLERANCES[self.dtype]


@dataclass(slots=True, eq=False)
class Filled(World):
    """A World whose cache belongs to a back-end; keys and values are what it gathers, inputs what was written
    (per ask [L, K, T, D])."""

    inputs: list[tuple[Tensor, Tensor]] = None  # type: ignore[assignment]
    spare: list[int] = None  # type: ignore[assignment]

    def tokens(self, ask: int, layer: int, cache: KVCache | None = None) -> PagedTokens:
        slots = self.batch.sequences[ask]
        cache = cache or self.cache
        return PagedTokens(cache.layers[layer], ids_on(cache, slots.block_ids), slots.seq_len)


def ids_on(cache: KVCache, block_ids: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(block_ids, dtype=np.int64)).to(cache.device)


def facts_of(shape: Shape) -> tuple[LayerFacts, ...]:
    first = LayerFacts(
        shape.heads, shape.kv_heads, shape.dim, shape.v_dim or shape.dim, Softmax(1.0), latent=shape.latent
    )
    return (first,) * shape.layers


def fill(rig: Rig, shape: Shape, asks: list[Ask], seed: int = 0, *, chunk: int = 1 << 20) -> Filled:
    """Each ask's tokens, written `chunk` at a time, in blocks of its own in random order."""
    shape = replace(shape, dtype=rig.dtype)
    needed = [-(-ask.seq_len // shape.block_size) + ask.spare for ask in asks]
    like = torch.empty(0, dtype=rig.dtype, device=rig.device)
    num_blocks = 2 * sum(needed) + 3
    cache = rig.backend.allocate(
        facts_of(shape),
        num_blocks,
        shape.block_size,
        like=like,
        kv_format=rig.fmt,
    )
    poison(cache)
    order = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    tables = [table.copy() for table in np.split(order, np.cumsum(needed))[: len(asks)]]
    rig.backend.prepare_blocks(cache, order[: sum(needed)].tolist())
    inputs = [inputs_of(shape, ask, seed + 10 * index + 1) for index, ask in enumerate(asks)]
    for table, tokens in zip(tables, inputs, strict=True):
        write(rig, cache, table, 0, tokens, chunk)
    slots = tuple(
        SequenceSlots(table, ask.query_len, ask.seq_len, ask.shift, slot_positions=ask.slot_positions)
        for ask, table in zip(asks, tables, strict=True)
    )
    batch = AttentionBatch.build(slots, shape.block_size, CPU)
    num_rows = sum(ask.query_len for ask in asks)
    q = noise(seed + 7, shape.layers, num_rows, shape.heads, shape.dim, dtype=rig.dtype)
    w = Filled(shape, asks, cache, q, batch, inputs=inputs, spare=order[sum(needed) :].tolist())
    read(rig, w)
    return w


def inputs_of(shape: Shape, ask: Ask, seed: int) -> tuple[Tensor, Tensor]:
    """Keys [L, K, T, D] and values; every channel of the keys has an offset of its own, as real keys have."""
    at = (shape.layers, shape.kv_heads, ask.seq_len)
    v = noise(seed + 1, *at, shape.v_dim or shape.dim)
    k = noise(seed, *at, shape.dim) + noise(seed + 2, shape.layers, shape.kv_heads, 1, shape.dim)
    if shape.latent:
        k = torch.cat((v, k[..., v.shape[-1] :]), -1)
    return k.to(shape.dtype), v.to(shape.dtype)


def poison(cache: KVCache) -> None:
    """NaN in plain planes, random bytes in coded ones."""
    rng = torch.Generator().manual_seed(5)
    for plane in cache.planes:
        if plane.dtype.is_floating_point:
            plane.fill_(torch.nan)
        else:
            plane.copy_(torch.randint(0, 256, plane.shape, dtype=torch.uint8, generator=rng))


def write(
    rig: Rig,
    cache: KVCache,
    table: np.ndarray,
    start: int,
    tokens: tuple[Tensor, Tensor],
    chunk: int = 1 << 20,
) -> None:
    """Append tokens to a sequence that has `start`."""
    size, count = cache.block_size, tokens[0].shape[2]
    for first in range(0, count, chunk):
        now = start + first
        slots = torch.arange(now, min(now + chunk, start + count))
        mapping = (ids_on(cache, table).cpu()[slots // size] * size + slots % size).to(rig.device)
        for layer in range(cache.num_layers):
            k, v = (x[layer, :, first : first + chunk].transpose(0, 1).to(rig.device) for x in tokens)
            rig.backend.write_kv(cache.layers[layer], k, v, mapping)


def read(rig: Rig, w: Filled) -> None:
    """What the cache holds, as keys and values of the oracles."""
    w.keys, w.values = [], []
    for ask in range(len(w.asks)):
        layers = [rig.backend.gather_tokens(w.tokens(ask, layer)) for layer in range(w.shape.layers)]
        assert all(x.dtype == rig.fmt.number for pair in layers for x in pair)
        k, v = (torch.stack(side).cpu() for side in zip(*layers, strict=True))
        w.keys.append(k)
        w.values.append(v)


def written(fmt: KVFormat, k: Tensor, v: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """What comes back of keys [.., T, D] and values [.., T, Dv] that were written in order."""
    v_dim = v.shape[-1]
    own = k[..., v_dim:] if shape.latent else k
    own, back = round_trip(fmt, own, v)
    return (torch.cat((back, own), -1) if shape.latent else own), back
