"""The cache as cells: one block of one KV head in one layer, S slots that lie together.

A sequence that holds n blocks holds n * L * K cells, and any of them may serve any of its (layer, KV head)
pairs. Viewed as a cache of one layer and one head with cells as blocks, it is served by every kernel
unchanged: each (sequence, KV head) is then a sequence of its own, with the G query heads of its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.batch import AttentionBatch, BatchArrays, SequenceSlots
from kvreclaim.ops.key_transform import KeyTransform
from kvreclaim.ops.kv_cache import KVCache, LayerCache, PagedTokens


def cell_view(cache: KVCache) -> KVCache:
    """Return a cached view with L = K = 1 and L * B * K blocks; block (l * B + b) * K + h of it is
    block b of KV head h in layer l."""

    def make(cache: KVCache) -> KVCache:
        cells = cache.num_layers * cache.num_blocks * cache.num_kv_heads
        shape = replace(cache.shape, num_layers=1, num_blocks=cells, num_kv_heads=1)
        planes = tuple(plane.view(1, cells, 1, *plane.shape[3:]) for plane in cache.planes)
        return KVCache(shape, cache.format, planes, cache.softmaxes[:1])

    return cache.cached("cells", make)


def cell_layers(cache: KVCache) -> tuple[LayerCache, ...]:
    """Return the one layer of the cell view as each layer of the model attends over it, made once."""

    def make(view: KVCache) -> tuple[LayerCache, ...]:
        return tuple(replace(view.layers[0], softmax=softmax) for softmax in cache.softmaxes)

    return cell_view(cache).cached("cells", make)


def head_tokens(
    cache: KVCache, layer: int, cells: Tensor, num_tokens: int, heads: Tensor | int
) -> PagedTokens:
    """Tokens of one layer in cells [n] int64 that hold keys of KV heads [n] int64, or of one."""
    owners = None
    if cache.softmaxes[layer].keys is not None:
        owners = torch.zeros_like(cells) + layer * cache.num_kv_heads + heads
    return PagedTokens(_cell_sources(cache)[layer], cells, num_tokens, owners)


def _cell_sources(cache: KVCache) -> tuple[LayerCache, ...]:
    """cell_layers with the key transforms of all layers' heads [L * K, D]: a table may hold cells of any."""

    def make(view: KVCache) -> tuple[LayerCache, ...]:
        layers = cell_layers(cache)
        keys = [layer.softmax.keys for layer in layers if layer.softmax.keys is not None]
        if not keys:
            return layers
        every = KeyTransform.joined(keys)
        return tuple(replace(each, softmax=replace(each.softmax, keys=every)) for each in layers)

    return cell_view(cache).cached("sources", make)


def natural_cells(cache: KVCache, block_ids: np.ndarray) -> np.ndarray:
    """[L, K, blocks] int32: the cells that every head has in these blocks, [blocks] int."""
    layers = np.arange(cache.num_layers)[:, None, None] * cache.num_blocks
    heads = np.arange(cache.num_kv_heads)[None, :, None]
    return ((layers + block_ids.astype(np.int64)) * cache.num_kv_heads + heads).astype(np.int32)


def blocks_of(cache: KVCache, cells: np.ndarray) -> np.ndarray:
    """Return the block that each cell lies in, in the shape of `cells`."""
    return cells // cache.num_kv_heads % cache.num_blocks


class _CellRows(Sequence[SequenceSlots]):
    """Sequences of the cell view, built for back-ends that read them one by one."""

    def __init__(
        self, tables: np.ndarray | Tensor, lengths: np.ndarray, query_lens: np.ndarray, block_size: int
    ) -> None:
        self._tables, self._lengths, self._query_lens = tables, lengths, query_lens
        self._block_size = block_size

    @cached_property
    def _made(self) -> list[SequenceSlots]:
        tables = self._tables.cpu().numpy() if isinstance(self._tables, Tensor) else self._tables
        held = (-(-self._lengths // self._block_size)).tolist()
        rows = zip(tables, held, self._query_lens.tolist(), self._lengths.tolist(), strict=True)
        return [SequenceSlots(table[:used], query_len, length) for table, used, query_len, length in rows]

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> SequenceSlots: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SequenceSlots]: ...
    def __getitem__(self, index: int | slice) -> SequenceSlots | Sequence[SequenceSlots]:
        return self._made[index]

    def __iter__(self) -> Iterator[SequenceSlots]:
        return iter(self._made)


@dataclass(frozen=True, eq=False, kw_only=True)
class CellBatch(AttentionBatch):
    """Sequences of the cell view with tables in tensors already. Kernels that follow tables themselves need
    no loop over sequences."""

    given: BatchArrays
    given_lengths: np.ndarray
    given_query_lens: np.ndarray

    @cached_property
    def arrays(self) -> BatchArrays:
        return self.given

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.given_lengths

    @cached_property
    def query_lens(self) -> np.ndarray:
        return self.given_query_lens

    @cached_property
    def has_positions(self) -> bool:
        return False


def cell_batch(
    tables: np.ndarray | Tensor,
    lengths: np.ndarray,
    query_lens: np.ndarray,
    given: BatchArrays,
    block_size: int,
) -> CellBatch:
    """A batch over the cell view.

    Args:
        tables:     [N, W] int32 cells, rows padded with any cell of the sequence; a tensor is fetched from
                    the device only if a back-end takes its sequences one by one
        lengths:    [N] tokens, those of this step included; query_lens: [N]
        given:      the same on the cache's device
    """
    nowhere = torch.empty(0, dtype=torch.int64, device=given.seq_lens.device)
    return CellBatch(
        sequences=_CellRows(tables, lengths, query_lens, block_size),
        slot_mapping=nowhere,
        block_size=block_size,
        given=given,
        given_lengths=lengths,
        given_query_lens=query_lens,
    )
