"""A pass under recall: survivors move together, losers are packed into cold pages, the best pages return.

slots of the table     [0, B - R S) survivors | [B - R S, B) recalled pages | tokens since the last pass
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression.recall.digest import digests_of
from kvreclaim.compression.recall.packing import order_of
from kvreclaim.engine.compact.job import CompactionJob, CompactionResult
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.engine.compact.recall_choice import best_pages, ranked
from kvreclaim.engine.compact.recall_state import PageTable, Waiting
from kvreclaim.engine.compact.recalls import Recalls
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.units import gather_units, read_units, unit_tokens, write_units
from kvreclaim.schedule.budget.recall import Recall


@dataclass(frozen=True, slots=True, eq=False)
class _Losers:
    """The evicted tokens in a table of V slots: the live ones in their blocks, then the waiting ones in the
    first staging block.

    cells:     [L, K, V / S] int64
    positions: [L, K, V] int32 on the device
    packed:    [L, K, V] bool, tokens that go into pages or wait
    intact:    [L, K, R] bool, recalled pages that lose all of their tokens
    """

    cells: Tensor
    positions: Tensor
    packed: Tensor
    intact: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _PackedPages:
    """New pages, in the order of (layer, head): at [U, 3] (layer, head, n-th of it), slots [U, S]; waits
    [L, K, n] slots."""

    at: Tensor
    slots: Tensor
    waits: Tensor


def recall_of(job: CompactionJob) -> Recall:
    """The recall settings of the sequence."""
    recall = job.compressor.recall
    assert recall is not None, f"sequence {job.seq.seq_id} does not recall"
    return recall


class RecallPass:
    """COMPACT with recall."""

    def __init__(self, context: PassContext, recalls: Recalls) -> None:
        self.context, self.recalls = context, recalls
        self.size = context.cache.block_size

    def choose(self, jobs: list[CompactionJob]) -> list[Tensor]:
        """[L, K, B - R S] int64 kept slots of each: recalled tokens are candidates like any other."""
        for job in jobs:
            self._sync(job)
        compressor = jobs[0].compressor
        keep = compressor.budget - recall_of(jobs[0]).slots(self.size)
        return compressor.choose_all([self.context.question(job) for job in jobs], keep=keep)

    def apply(self, job: CompactionJob, choice: Tensor) -> CompactionResult:
        context, seq_id = self.context, job.seq.seq_id
        heads = context.cache.num_layers, context.cache.num_kv_heads
        recall = recall_of(job)
        kept = choice.expand(*heads, -1)
        source = context.index(job)
        target = torch.tensor(job.plan.target_ids, device=source.device)
        first = kept.shape[-1] // self.size
        before = self.recalls.tables.get(seq_id)
        losers = self._losers(job, kept, source, before)
        packed = self._pack(job, losers, source)
        self.recalls.make_room(len(packed.at) + heads[0] * heads[1])
        table = self.recalls.tables.get(seq_id) if before is not None else None
        if table is None:
            dim = context.cache.head_dim
            table = PageTable.empty(heads, recall.blocks, self.size, dim, source.device)
        table = self._store(job, table, losers, packed)
        self.recalls.tables[seq_id] = table
        fresh = self._come_back(job, table, losers, kept, source)
        moved = not torch.equal(source[first : first + recall.blocks], target[first:])
        context.backend.compact(context.cache, choice, source, target[:first])
        self.recalls.write_back(seq_id, target[first:], fresh | moved)
        context.moved(job, choice)
        self._sync(job, kept.shape[-1])
        return CompactionResult(choice)

    def _sync(self, job: CompactionJob, num_survivors: int | None = None) -> None:
        """Update the positions of recalled tokens in the sequence's state from the pages."""
        seq, table = job.seq, self.recalls.tables.get(job.seq.seq_id)
        if table is None:
            return
        known, back = seq.state.slot_positions, table.hot_positions
        assert known is not None, "a pass has left positions"
        count = known.shape[-1] - back.shape[-1] if num_survivors is None else num_survivors
        seq.state.slot_positions = torch.cat([known[..., :count], back.to(known.device)], -1)

    def _losers(self, job: CompactionJob, kept: Tensor, source: Tensor, table: PageTable | None) -> _Losers:
        recalls, size, num_tokens = self.recalls, self.size, job.plan.num_tokens
        blocks = torch.cat([source, recalls.staging[:1]])
        num_slots = len(blocks) * size
        packed = torch.zeros((*kept.shape[:2], num_slots), dtype=torch.bool, device=kept.device)
        packed[..., :num_tokens] = True
        packed.scatter_(-1, kept, False)
        positions = torch.full(packed.shape, -1, dtype=torch.int32, device=kept.device)
        positions[..., :num_tokens] = self.context.positions(job)
        cells = recalls.cells(blocks)
        recall = recall_of(job)
        intact = torch.zeros((*kept.shape[:2], recall.blocks), dtype=torch.bool, device=kept.device)
        if table is not None:
            back = packed[..., kept.shape[-1] : kept.shape[-1] + recall.slots(size)]
            back = back.unflatten(-1, (-1, size))
            intact = back.all(-1)
            back &= ~intact[..., None]
        if table is not None and table.waiting is not None:
            waiting, start = table.waiting, num_slots - size
            write_units(
                self.context.cache, recalls.pool.bytes[waiting.rows.flatten()], cells[..., -1].flatten()
            )
            count = waiting.positions.shape[-1]
            packed[..., start : start + count] = True
            positions[..., start : start + count] = waiting.positions.to(positions.device)
        return _Losers(cells, positions, packed, intact)

    def _pack(self, job: CompactionJob, losers: _Losers, source: Tensor) -> _PackedPages:
        """Pack losers into pages. The newest ones, less than a page, wait."""
        size, count = self.size, losers.packed.sum(-1)
        left = int(count[0, 0]) % size
        assert bool((count % size == left).all()), "heads have lost unequal numbers of tokens"
        age = losers.positions.masked_fill(~losers.packed, -1)
        waits = age.topk(left, dim=-1).indices.sort(-1).values
        packed = losers.packed.scatter(-1, waits, False)
        recall = recall_of(job)
        orders = []
        for layer in range(len(count)):
            keys = losers.positions[layer, ..., None]
            if recall.packing != "time":
                blocks = torch.cat([source, self.recalls.staging[:1]])
                tokens = PagedTokens(self.context.cache.layers[layer], blocks, packed.shape[-1])
                keys = self.context.backend.gather_tokens(tokens)[0]
            orders.append(order_of(recall.packing, keys, losers.positions[layer], packed[layer], size))
        pages = count // size
        most = int(pages.max())
        order = torch.stack(orders)[..., : most * size].unflatten(-1, (most, size))
        valid = torch.arange(most, device=pages.device) < pages[..., None]
        return _PackedPages(valid.nonzero(), order[valid], waits)

    def _store(
        self, job: CompactionJob, table: PageTable, losers: _Losers, packed: _PackedPages
    ) -> PageTable:
        """Copy losers out of the cache. Returns: the table with the new pages. They replace pages that lost
        tokens to the survivors."""
        recalls, device = self.recalls, packed.at.device
        heads = table.rows.shape[:2]
        recall = recall_of(job)
        broken = ~losers.intact if table.num_pages else torch.zeros_like(losers.intact)
        new = len(packed.at) - int(broken.sum())
        num_pages = table.num_pages + new // (heads[0] * heads[1])
        added = torch.arange(table.num_pages, num_pages, device=device).expand(*heads, -1)
        free = torch.cat([broken, torch.ones_like(added, dtype=torch.bool)], -1)
        places = torch.cat([table.hot, added], -1)[free]
        assert len(places) == len(packed.at), f"{len(places)} places for {len(packed.at)} pages"
        at = (packed.at[:, 0], packed.at[:, 1], places)
        here = tuple(x.cpu() for x in at)
        freed = table.broken_rows(broken)
        grown = table.grown(num_pages)
        waits = packed.waits
        units = len(packed.at) + (heads[0] * heads[1] if waits.shape[-1] else 0)
        rows = recalls.pool.take(units)
        try:
            self._copy_out(losers, packed, rows, grown, at, recall.digest)
        except Exception:
            recalls.pool.give_back(rows)
            raise
        recalls.pool.give_back(freed)
        grown.rows[here] = rows[: len(packed.at)]
        positions = losers.positions[at[:2]].take_along_dim(packed.slots, -1)
        grown.positions[here] = positions.cpu()
        grown.tries[at] = 0
        if table.num_pages:
            grown.tries.scatter_add_(-1, table.hot, losers.intact.int())
        recalls.totals.recall_hits += int(broken.sum())
        grown.waiting = None
        if waits.shape[-1]:
            own = losers.positions.take_along_dim(waits, -1).cpu()
            grown.waiting = Waiting(rows[len(packed.at) :].view(*heads), own)
        return grown

    def _copy_out(
        self,
        losers: _Losers,
        packed: _PackedPages,
        rows: Tensor,
        table: PageTable,
        at: tuple[Tensor, ...],
        digest: str,
    ) -> None:
        """Copy new pages and waiting tokens to the cold pool, a few at a time through the staging blocks."""
        recalls, cache, backend, size = self.recalls, self.context.cache, self.context.backend, self.size
        slots, layer_head = packed.slots, packed.at[:, :2]
        if packed.waits.shape[-1]:
            padded = torch.cat([packed.waits, packed.waits[..., -1:].expand(-1, -1, size)], -1)[..., :size]
            slots = torch.cat([slots, padded.flatten(0, 1)])
            every = torch.ones(padded.shape[:2], dtype=torch.bool, device=slots.device).nonzero()
            layer_head = torch.cat([layer_head, every])
        cells = losers.cells[layer_head[:, 0], layer_head[:, 1]].take_along_dim(slots // size, -1)
        staging = recalls.cells(recalls.staging[1:]).flatten()
        buffer = recalls.pool.bytes.new_empty((min(len(staging), len(slots)), recalls.pool.unit_bytes))
        for start in range(0, len(slots), len(staging)):
            part = slice(start, min(start + len(staging), len(slots)))
            targets = staging[: part.stop - start]
            gather_units(backend, cache, cells[part].flatten(), slots[part].flatten() % size, targets)
            read_units(cache, targets, buffer[: len(targets)])
            recalls.pool.bytes[rows[part]] = buffer[: len(targets)]
            pages = slice(start, min(part.stop, len(packed.at)))
            if pages.stop > pages.start:
                keys, values = unit_tokens(backend, cache, targets[: pages.stop - start], layer_head[pages])
                table.digests.put(tuple(x[pages] for x in at), digests_of(keys, values, digest))

    def _come_back(
        self, job: CompactionJob, table: PageTable, losers: _Losers, kept: Tensor, source: Tensor
    ) -> Tensor:
        """Choose the recalled pages. Returns: [L, K, R] bool, blocks with another page than before."""
        context, recall, seq = self.context, recall_of(job), job.seq
        found = []
        for layer in range(len(kept)):
            tokens = PagedTokens(context.cache.layers[layer], source, job.plan.num_tokens)
            keys = context.backend.gather_tokens(tokens)[0]
            live = keys.take_along_dim(kept[layer][..., None], 1)
            queries = None
            if recall.needs_queries and recall.source != "mixture":
                queries = context.signals.queries_of(seq, layer, recall.every)
            found.append(
                self.recalls.benefits(
                    table, layer, job.compressor, live, queries, job.plan.logical_len, at_pass=True
                )
            )
        table.benefit = torch.stack(found)
        rank = ranked(table.benefit, table.tries, table.hot, losers.intact)
        table.hot, fresh = best_pages(rank, table.hot, losers.intact)
        return fresh
