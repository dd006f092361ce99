"""Chunks that were computed alone and are reused at other positions: their keys are rotated, their values are
copied, and some tokens are recomputed.

Recomputed tokens go through the model in runs. Each contiguous run is a sequence of its own over the same
table, up to the run's last token, so every token attends to exactly the keys before it. (Methods that compact
rows under one mask let earlier tokens attend to later ones.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.request.chunk_reuse import Reuse, ReusedChunk
from kvreclaim.engine.request.request import Scheduled
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.rope import rotate
from kvreclaim.schedule import Row


def has_chunks(item: Scheduled) -> bool:
    """Return whether some of the item's tokens may be of a reused chunk."""
    reuse = item.seq.request.reuse
    return reuse is not None and item.seq.num_computed < len(reuse.anew)


def expanded(step: Sequence[Scheduled]) -> list[Scheduled]:
    """Return the step with one item per run of computed tokens."""
    return [
        part
        for item in step
        for part in (
            [Scheduled(item.seq, Row(item.seq.seq_id, run.start, len(run))) for run in _runs(item)]
            if has_chunks(item)
            else [item]
        )
    ]


def _runs(item: Scheduled) -> list[range]:
    """Return the item's runs of computed tokens; at least its last one, for logits (see `bring_last`)."""
    start, reuse = item.seq.num_computed, item.seq.request.reuse
    stop = start + item.num_tokens
    if reuse is None or start >= len(reuse.anew):
        return [range(start, stop)]
    anew = np.ones(item.num_tokens, dtype=bool)
    known = reuse.anew[start:stop]
    anew[: len(known)] = known
    if not anew.any():
        return [range(stop - 1, stop)]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], anew, [False]])))
    runs = [range(start + a, start + b) for a, b in edges.reshape(-1, 2).tolist()]
    return [part for run in runs for part in _parted(run, reuse)]


def _parted(run: range, reuse: Reuse) -> list[range]:
    """Split the run after the last chunk, if the attention of the tokens that follow is needed."""
    at = reuse.asked_from
    if reuse.scores is None or not run.start < at < run.stop:
        return [run]
    return [range(run.start, at), range(at, run.stop)]


class ChunkLoader:
    """Writes the keys and values of chunks to a prompt's slots."""

    def __init__(self, memory: MemoryManager, cache: KVCache, ops: Backend, facts: ModelFacts) -> None:
        self.memory, self.cache, self.ops = memory, cache, ops
        self.layouts = [layer.rope for layer in facts.layers]

    def bring(self, item: Scheduled) -> None:
        """Copy the reused tokens of an item. Tokens that have left the cache are marked for recomputation."""
        reuse, start = item.seq.request.reuse, item.seq.num_computed
        if reuse is None:
            return
        stop = start + item.num_tokens
        for source in reuse.sources:
            first, last = max(start, source.start), min(stop, source.stop)
            if first < last and not reuse.anew[first:last].all():
                self._copy(item, reuse, source, first, last)

    def bring_last(self, item: Scheduled) -> None:
        """Copy the last token again, if it was computed for its logits only."""
        reuse, at = item.seq.request.reuse, item.seq.num_computed + item.num_tokens - 1
        if reuse is None or at >= len(reuse.anew) or reuse.anew[at]:
            return
        source = next(each for each in reuse.sources if each.start <= at < each.stop)
        self._copy(item, reuse, source, at, at + 1)

    def _copy(self, item: Scheduled, reuse: Reuse, source: ReusedChunk, first: int, last: int) -> None:
        match = self.memory.match_prefix(source.keys)
        available_end = source.origin + len(match.entries) * self.cache.block_size
        if available_end < last:
            missing = slice(max(first, available_end), last)
            reuse.num_gone += int((~reuse.anew[missing]).sum())
            reuse.anew[missing] = True
            last = available_end
        if first >= last:
            return
        size, device = self.cache.block_size, self.cache.device
        ids = torch.tensor(match.block_ids, device=device)
        held = self.memory.table(item.seq.seq_id)
        moved = held.physical_len - item.seq.num_computed
        slots = torch.arange(first + moved, last + moved, device=device)
        table = torch.tensor([block or 0 for block in held.block_ids], device=device)
        mapping = table[slots // size] * size + slots % size
        shift = torch.full((last - first,), source.origin, device=device)
        for layer, layout in zip(self.cache.layers, self.layouts, strict=True):
            num_read = last - source.origin
            tokens = PagedTokens(layer, ids[: -(-num_read // size)], num_read)
            k, v = (x[:, first - source.origin :] for x in self.ops.gather_tokens(tokens))
            assert layout is not None, "refused where no rotation is known"
            turned = rotate(k, shift, layout)
            self.ops.write_kv(layer, turned.transpose(0, 1), v.transpose(0, 1), mapping)


class AttentionProbe:
    """Sums the attention of the tokens after the last chunk, for prompts that measure reuse."""

    def __init__(
        self, step: Sequence[Scheduled], batch: AttentionBatch, cache: KVCache, ops: Backend
    ) -> None:
        self.cache, self.ops = cache, ops
        starts = np.cumsum([0, *batch.query_lens]).tolist()
        self._probed = [
            (slice(starts[i], starts[i + 1]), batch.part([i]), item.seq.request.reuse)
            for i, item in enumerate(step)
            if _is_probed(item)
        ]
        self._sums: dict[int, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._probed)

    def see(self, call: AttentionCall) -> None:
        for i, (rows, batch, reuse) in enumerate(self._probed):
            if reuse is not None and call.layer in reuse.layers:
                sums = self.ops.column_sums(call.q[rows], self.cache.layers[call.layer], batch)[0].sum(0)
                self._sums[i] = sums + self._sums.get(i, 0)

    def commit(self) -> None:
        for i, sums in self._sums.items():
            reuse = self._probed[i][2]
            assert reuse is not None
            assert reuse.scores is not None
            width = min(len(sums), len(reuse.scores))
            reuse.scores[:width] += sums[:width].cpu().numpy()


def _is_probed(item: Scheduled) -> bool:
    reuse, first = item.seq.request.reuse, item.row.first
    if reuse is None or reuse.scores is None:
        return False
    return reuse.asked_from <= first < len(reuse.anew)
