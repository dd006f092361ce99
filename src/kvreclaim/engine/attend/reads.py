"""READS: digests of full blocks, and at each decode step the blocks that each head reads.

Nothing is evicted or written, so prefixes stay shared. A prompt is attended whole; every token after it,
once the sequence is longer than the budget, reads budget / S blocks per (layer, KV head): those of the sinks,
those of the recent tokens, and those with the highest block scores among the rest.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.request.request import Scheduled
from kvreclaim.engine.signals.store import DigestStore
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import BatchArrays
from kvreclaim.ops.cells import CellBatch, cell_batch
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.moving import to_device

MAX_ELEMENTS = 1 << 24
"""Digest entries that are compared with queries at once; more queries of one sequence are cut into pieces."""
FORCED = torch.finfo(torch.float32).max


class SparseReads:
    """The sequences of a step that share a compressor and read sparsely: tables for HeadPart, layer by layer.

    Every row is a sequence of its own: it reads its own blocks, up to its own position.
    R: rows of all sequences; W: blocks of the longest; N: full blocks before the newest of any row.
    """

    def __init__(
        self,
        items: list[Scheduled],
        memory: MemoryManager,
        cache: KVCache,
        ops: Backend,
        store: DigestStore,
    ) -> None:
        compressor = items[0].seq.request.compressor
        assert compressor is not None, f"sequence {items[0].seq.seq_id} has no compression"
        self.cache, self.ops, self.store, self.compressor = cache, ops, store, compressor
        size, device = cache.block_size, cache.device
        self.query_lens = [item.num_tokens for item in items]
        starts = [item.row.first for item in items]
        ends = [start + length for start, length in zip(starts, self.query_lens, strict=True)]
        self._seq_ids = [item.seq.seq_id for item in items]
        rows = [item.seq.block_row(memory.table(item.seq.seq_id)) for item in items]
        self._filled: list[tuple[int, range, Tensor]] = []
        for seq_id, end, row in zip(self._seq_ids, ends, rows, strict=True):
            if missing := store.claim(seq_id, end // size):
                ids = to_device(row[missing.start : missing.stop].astype(np.int64), device)
                self._filled.append((seq_id, missing, ids))
        self._rows = store.index(self._seq_ids)
        positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        self.positions = to_device(positions, device)
        self._places = compressor.budget // size - 1
        lengths = self._places * size + positions % size + 1
        self._lengths = np.repeat(lengths, cache.num_kv_heads)
        self._sent_lengths = to_device(self._lengths.astype(np.int32), device)
        self._starts = torch.arange(len(lengths) * cache.num_kv_heads + 1, dtype=torch.int32, device=device)
        self._shifts = torch.zeros_like(self._sent_lengths)
        padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row
        self._row_table = to_device(np.repeat(padded, self.query_lens, axis=0), device)
        self._num_blocks = int(positions.max()) // size
        self._bias = self._block_bias()

    def _block_bias(self) -> Tensor:
        """[R, N] fp32 added to block scores: for blocks that must be read, and for blocks after the row."""
        config, size = self.compressor.config, self.cache.block_size
        blocks = torch.arange(self._num_blocks, device=self.cache.device)
        newest = self.positions[:, None] // size
        recent = (self.positions[:, None] + 1 - config.recent) // size
        forced = (blocks < max(1, blocks_for(config.sinks, size))) | (blocks >= recent)
        bias = torch.zeros(forced.shape, device=self.cache.device)
        bias[forced] = FORCED
        bias[blocks >= newest] = -torch.inf
        return bias

    def batch(self, layer: int, q: Tensor) -> CellBatch:
        """Return the blocks that each (row, KV head) reads. q: [R, H, D], the rows' queries in this layer.
        Their keys are already in the cache."""
        self._digest(layer)
        scores = self._scores(layer, q)
        bias = self._bias[:, None]
        scores = torch.where(bias == 0, scores, bias)
        size, heads = self.cache.block_size, self.cache.num_kv_heads
        chosen = self.ops.select_top(scores.flatten(0, 1), self._places).view(-1, heads, self._places)
        newest = (self.positions // size)[:, None, None].expand(-1, heads, 1)
        indices = torch.cat([chosen, newest], -1)
        blocks = self._row_table[:, None].expand(-1, heads, -1).gather(-1, indices)
        head = torch.arange(heads, device=blocks.device)[:, None]
        cells = ((layer * self.cache.num_blocks + blocks) * heads + head).flatten(0, 1).int()
        given = BatchArrays(cells, self._starts, self._sent_lengths, self._shifts, 1, cells.shape[1] * size)
        return cell_batch(cells, self._lengths, np.ones(len(cells), dtype=np.int64), given, size)

    def _digest(self, layer: int) -> None:
        """Write the digests of blocks that have filled up since the last step."""
        size = self.cache.block_size
        for seq_id, missing, ids in self._filled:
            tokens = PagedTokens(self.cache.layers[layer], ids, len(missing) * size)
            keys = self.ops.gather_tokens(tokens)[0].unflatten(1, (len(missing), size))
            target = self.store.row(seq_id)[layer, :, :, missing.start : missing.stop]
            target[0], target[1] = keys.amin(2), keys.amax(2)

    def _scores(self, layer: int, q: Tensor) -> Tensor:
        """[R, K, N] fp32 block scores."""
        digests = self.store.tensor[:, layer, :, :, : self._num_blocks]
        if len(q) == len(self._seq_ids):
            low, high = digests[self._rows].unbind(1)
            return self.compressor.block_scores(q, low, high)
        parts = []
        step = max(1, MAX_ELEMENTS // digests[:1].numel())
        for row, queries in zip(self._rows.tolist(), q.split(self.query_lens), strict=True):
            low, high = digests[row].unbind(0)
            for piece in queries.split(step):
                shape = (len(piece), *low.shape)
                parts.append(self.compressor.block_scores(piece, low.expand(shape), high.expand(shape)))
        return torch.cat(parts)
