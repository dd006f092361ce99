"""Sparse prefill: rows of a prompt that read some of the blocks before them, each KV head its own.

The rows are cut into tiles at multiples of the tile in the text. Each (tile, KV head) is a sequence of the
cell view: its table names the cells that it reads, in token order, then those around the tile, so that the
kernels of dense attention serve it. What a tile reads follows from its own rows and the cells before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.prefill.method import Tiles
from kvreclaim.engine.attend.cell_tables import head_cells
from kvreclaim.engine.attend.parts import AttentionPart, HeadPart, head_order
from kvreclaim.engine.request.request import Scheduled
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import BatchArrays
from kvreclaim.ops.cell_tables import head_lengths
from kvreclaim.ops.cells import CellBatch, cell_batch, cell_layers, head_tokens
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.moving import to_device


def sparse_tokens(item: Scheduled) -> range:
    """Positions of the step's tokens of a sequence that read sparsely."""
    rows, start = item.seq.footprint.sparse_rows(item.seq.num_prompt), item.seq.num_computed
    return range(max(start, rows.start), min(start + item.num_tokens, rows.stop))


@dataclass(frozen=True, slots=True, eq=False)
class _Cells:
    """A sequence's cells in one layer. table: [K, W] int64, in token order; lengths: [K] int64 tokens."""

    table: Tensor
    lengths: Tensor


class SparsePart:
    """One sequence with tokens that read sparsely, in all but the method's first layers.

    rows:  its tokens in the step
    dense: the part that attends for all of them in the dense layers
    """

    def __init__(
        self,
        item: Scheduled,
        dense: AttentionPart,
        memory: MemoryManager,
        cache: KVCache,
        ops: Backend,
    ) -> None:
        method = item.seq.request.sparse_prefill
        assert method is not None, f"request {item.seq.request_id} is computed densely"
        self.item, self.method, self.dense = item, method, dense
        self.cache, self.ops = cache, ops
        self.cells = cell_layers(cache)
        start, device, seq = item.seq.num_computed, cache.device, item.seq
        assert seq.footprint.sparse is not None, f"sequence {seq.seq_id} computes nothing sparsely"
        stop, tile = start + item.num_tokens, seq.footprint.sparse.tile
        tokens = sparse_tokens(item)
        cuts = [tokens.start, *range((tokens.start // tile + 1) * tile, tokens.stop, tile), tokens.stop]
        self.num_dense = tokens.start - start
        self.starts = np.array(([start] if self.num_dense else []) + cuts[:-1])
        self.tile_lengths = np.diff([*self.starts, tokens.stop])
        self._order = head_order(self.tile_lengths.tolist(), cache.num_kv_heads, device)
        physical = memory.table(seq.seq_id).physical_len + item.num_tokens
        self._tables = head_cells(seq, memory, cache)
        self._lengths = head_lengths(seq.state.cells, physical, cache)
        self._before_end = to_device(stop - (self.starts + self.tile_lengths), device)
        self._sent_lengths = to_device(self.tile_lengths, device)
        query_starts = np.cumsum([0, *np.repeat(self.tile_lengths, cache.num_kv_heads)], dtype=np.int32)
        self._query_starts = to_device(query_starts, device)

    @property
    def rows(self) -> Tensor:
        return self.dense.rows

    def attend(self, call: AttentionCall, q: Tensor) -> Tensor:
        """[t, H, Dv]"""
        metrics = self.item.seq.request.metrics
        if call.layer < self.method.layers:
            kept = None
        else:
            cells = self._cells(call.layer)
            tiles = self._tiles(call.layer, cells, q)
            kept = self.method.choose(tiles) & tiles.visible if tiles.num_blocks else None
            if kept is not None and bool((kept == tiles.visible).all()):
                kept = None
        ends = self._lengths[call.layer] - self._before_end.cpu().numpy()[:, None]
        weights = self.tile_lengths[:, None]
        metrics.prefill_tokens_seen += int((ends * weights)[self._first :].sum())
        if kept is None:
            metrics.prefill_tokens_read += int((ends * weights)[self._first :].sum())
            return self.dense.attend(call, q)
        batch = self._batch(tiles, kept, cells)
        read = batch.lengths.reshape(len(self.starts), -1)
        metrics.prefill_tokens_read += int((read * weights)[self._first :].sum())
        part = HeadPart(self.ops, self.cells, self.rows, self._order, lambda *_: batch)
        return part.attend(call, q)

    @property
    def _first(self) -> int:
        """The first tile that reads sparsely."""
        return 1 if self.num_dense else 0

    def _cells(self, layer: int) -> _Cells:
        device = self.cache.device
        lengths = torch.from_numpy(self._lengths[layer].astype(np.int64)).to(device)
        return _Cells(torch.from_numpy(self._tables[layer].astype(np.int64)).to(device), lengths)

    def _tiles(self, layer: int, cells: _Cells, q: Tensor) -> Tiles:
        first, longest = self._first, int(self.tile_lengths[self._first :].max())
        offsets = self.starts[first:, None] - self.item.seq.num_computed + np.arange(longest)
        index = to_device(np.minimum(offsets, len(q) - 1), q.device)
        ends = cells.lengths - self._before_end[first:, None]
        lengths = self._sent_lengths[first:]
        return Tiles(
            layer=layer,
            queries=q[index],
            positions=tuple(self.starts[first:].tolist()),
            lengths=lengths,
            ends=ends,
            past=(ends - lengths[:, None]).clamp(min=0) // self.method.block,
            block=self.method.block,
            softmax=self.cache.softmaxes[layer],
            keys=partial(self._keys, layer, cells),
        )

    def _keys(self, layer: int, cells: _Cells, first: int, stop: int) -> Tensor:
        """Slots first .. stop - 1 of every head."""
        size = self.cache.block_size
        low, high = first // size, -(-stop // size)
        held = cells.table[:, low : min(high, cells.table.shape[1])]
        heads = torch.arange(len(held), device=held.device).repeat_interleave(held.shape[1])
        tokens = head_tokens(self.cache, layer, held.flatten(), held.numel() * size, heads)
        keys = self.ops.gather_tokens(tokens)[0].float().view(len(held), -1, self.cache.head_dim)
        return keys[:, first - low * size : stop - low * size]

    def _batch(self, tiles: Tiles, kept: Tensor, cells: _Cells) -> CellBatch:
        """Tables of the tiles, the dense rows in front of them included."""
        size, block, device = self.cache.block_size, self.method.block, self.cache.device
        width = cells.table.shape[1]
        index = torch.arange(width, device=device)
        chosen = kept.repeat_interleave(block // size, -1)[..., :width]
        mask = torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]))
        past, ends = tiles.past[..., None], tiles.ends[..., None]
        mask |= (index >= past * (block // size)) & (index * size < ends)
        lengths = tiles.ends - (tiles.past - kept.sum(-1)) * block
        if self.num_dense:
            ends = cells.lengths - self._before_end[0]
            mask = torch.cat([(index * size < ends[:, None])[None], mask])
            lengths = torch.cat([ends[None], lengths])
        table = _gathered(mask, cells.table).flatten(0, 1).int()
        lengths = lengths.flatten()
        host = lengths.cpu().numpy()
        given = BatchArrays(
            block_table=table,
            query_starts=self._query_starts,
            seq_lens=lengths.int(),
            shifts=torch.zeros_like(lengths, dtype=torch.int32),
            max_query_len=int(self.tile_lengths.max()),
            max_seq_len=int(host.max()),
        )
        query_lens = np.repeat(self.tile_lengths, self.cache.num_kv_heads)
        return cell_batch(table, host, query_lens, given, size)


def _gathered(mask: Tensor, table: Tensor) -> Tensor:
    """[n, K, most]: of each row of mask [n, K, W] the entries of table [K, W] that are set, in their order,
    padded with the head's first."""
    places = mask.cumsum(-1) - 1
    most = int(places[..., -1].max()) + 1
    found = table[:, :1].expand(*mask.shape[:2], most).clone()
    tile, head, column = mask.nonzero(as_tuple=True)
    found[tile, head, places[tile, head, column]] = table[head, column]
    return found
