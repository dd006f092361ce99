"""The cold pages of all sequences, and the recalled ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.recall.digest import benefit, live_mass, mixture_benefit
from kvreclaim.engine.compact.recall_choice import best_pages, ranked
from kvreclaim.engine.compact.recall_cold import ColdPool
from kvreclaim.engine.compact.recall_state import PageTable
from kvreclaim.engine.request.outputs import EngineTotals
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.units import unit_bytes, write_units

STAGING_BLOCKS = 9
"""Blocks of the cache after the pool's: one for tokens that wait for a page, the others to stage pages that
are copied to the host."""


class Recalls:
    """Page tables by sequence over one pool of cold memory. `drop` frees a sequence's pages.

    num_blocks: of the pool; the cache has STAGING_BLOCKS more
    max_bytes:  of cold pages of all sequences
    """

    def __init__(
        self,
        cache: KVCache,
        backend: Backend,
        facts: ModelFacts,
        num_blocks: int,
        max_bytes: int,
        totals: EngineTotals,
    ) -> None:
        self.cache, self.backend, self.facts, self.totals = cache, backend, facts, totals
        self.staging = torch.arange(num_blocks, cache.num_blocks, device=cache.device)
        assert len(self.staging) == STAGING_BLOCKS, f"{len(self.staging)} blocks for staging"
        self.pool = ColdPool(unit_bytes(cache), max_bytes, pinned=cache.device.type == "cuda")
        self.tables: dict[int, PageTable] = {}

    def least_rows(self, num_blocks: int) -> int:
        """Return the rows of the pool that a pass of a sequence with num_blocks recall blocks needs: recalled
        pages, before and after, and waiting tokens."""
        return 2 * (num_blocks + 1) * self.cache.num_layers * self.cache.num_kv_heads

    def cells(self, blocks: Tensor) -> Tensor:
        """[L, K, n] int64: the cells that every head has in blocks [n]."""
        shape, device = self.cache.shape, self.cache.device
        layers = torch.arange(shape.num_layers, device=device)[:, None, None] * shape.num_blocks
        heads = torch.arange(shape.num_kv_heads, device=device)[:, None]
        return (layers + blocks) * shape.num_kv_heads + heads

    def fork(self, parent_id: int, child_id: int) -> None:
        """Share the parent's pages with the child."""
        table = self.tables.get(parent_id)
        if table is not None:
            self.pool.share(table.held)
            self.tables[child_id] = table.fork()

    def drop(self, seq_id: int) -> None:
        """Forget the pages of a sequence that has ended or is computed anew."""
        table = self.tables.pop(seq_id, None)
        if table is not None:
            self.pool.give_back(table.held)

    def make_room(self, count: int) -> None:
        """Drop pages until `count` rows are free: the least useful ones of the sequence with the most pages,
        equally many per head. Recalled pages stay. If no page can be dropped, the next `take` raises
        MemoryError."""
        heads = self.cache.num_layers * self.cache.num_kv_heads
        while (missing := count - self.pool.num_free) > 0:
            rich = max(self.tables, key=lambda seq_id: self._spare(seq_id), default=None)
            if rich is None or not self._spare(rich):
                return
            self._shrink(rich, min(self._spare(rich), -(-missing // heads)))

    def write_back(self, seq_id: int, blocks: Tensor, fresh: Tensor, layers: slice = slice(None)) -> None:
        """Copy pages to the recall blocks [R] of a sequence where `fresh` [layers, K, R] is set."""
        table = self.tables[seq_id]
        hot = table.hot[layers].cpu()
        rows = table.rows[layers].take_along_dim(hot, -1)[fresh.cpu()]
        if len(rows):
            write_units(self.cache, self.pool.bytes[rows], self.cells(blocks)[layers][fresh])
        self.totals.recall_pages += len(rows)
        self.totals.recall_bytes += len(rows) * self.pool.unit_bytes

    def benefits(
        self,
        table: PageTable,
        layer: int,
        compressor: Compressor,
        live: Tensor,
        queries: Tensor | None,
        moment: int,
        *,
        at_pass: bool = False,
    ) -> Tensor:
        """[K, P] of one layer.

        live: [K, T, D] keys of tokens that are attended anyway; queries: [H, n, D], None if none are kept
        moment: slots in use or, at a pass, where statistics may know of queries to come, the logical length
        """
        recall, facts = compressor.recall, self.facts.layers[layer]
        assert recall is not None, "the request has no recall"
        digests, scale = table.digests[layer], facts.softmax.scale
        if recall.source == "random":
            draw = torch.Generator().manual_seed(layer + 65_537 * moment)
            return torch.rand(digests.scale.shape, generator=draw).to(live.device)
        found = []
        if queries is not None:
            rows = queries.unflatten(0, (facts.num_kv_heads, -1)).flatten(1, 2)
            found.append(benefit(rows, digests, live_mass(rows, live, scale), scale))
        if recall.needs_mixture and at_pass:
            stats = compressor.stats_of(layer)
            assert stats is not None, "checked with the policy"
            found.append(mixture_benefit(stats, facts, moment, digests, live))
        return found[0] if len(found) == 1 else torch.maximum(*found)

    def refresh(
        self,
        seq_id: int,
        layer: int,
        compressor: Compressor,
        queries: Tensor | None,
        blocks: Tensor,
        num_slots: int,
    ) -> Tensor | None:
        """Choose the pages of one layer by queries [H, n, D], and copy them into its recall blocks.

        blocks: [n] int64, the sequence's unshared table; num_slots: tokens in it

        Returns: [K, R] bool, blocks that hold another page now; None if none does.
        """
        table, recall = self.tables[seq_id], compressor.recall
        assert recall is not None, "the request has no recall"
        tokens = PagedTokens(self.cache.layers[layer], blocks, num_slots)
        live = self.backend.gather_tokens(tokens)[0]
        back, size = self.slots(compressor), self.cache.block_size
        first, end = back.start // size, back.stop // size
        kept = torch.cat([live[:, : back.start], live[:, back.stop :]], 1)
        found = self.benefits(table, layer, compressor, kept, queries, num_slots)
        hot = table.hot[layer]
        stays = torch.ones_like(hot, dtype=torch.bool)
        chosen, fresh = best_pages(ranked(found, table.tries[layer], hot, stays), hot, stays)
        if not bool(fresh.any()):
            return None
        table.hot, table.benefit = table.hot.clone(), table.benefit.clone()
        table.hot[layer], table.benefit[layer] = chosen, found
        self.write_back(seq_id, blocks[first:end], fresh[None], slice(layer, layer + 1))
        return fresh

    def slots(self, compressor: Compressor) -> slice:
        """Slots of recalled tokens in a sequence's table."""
        assert compressor.recall is not None, "the request has no recall"
        count = compressor.recall.slots(self.cache.block_size)
        return slice(compressor.budget - count, compressor.budget)

    def _spare(self, seq_id: int) -> int:
        """Return the pages per head that can be dropped."""
        table = self.tables[seq_id]
        return table.num_pages - table.hot.shape[-1]

    def _shrink(self, seq_id: int, count: int) -> None:
        table = self.tables[seq_id]
        rank = table.benefit.scatter(-1, table.hot, torch.inf)
        kept = rank.topk(table.num_pages - count, dim=-1).indices.sort(-1).values
        is_dropped = torch.ones_like(rank, dtype=torch.bool).scatter(-1, kept, False).cpu()
        self.pool.give_back(table.rows[is_dropped])
        self.tables[seq_id] = table.without(kept)
        self.totals.cold_dropped += int(is_dropped.sum())
