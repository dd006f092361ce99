"""Recall between passes: by the last queries every few tokens, or by the queries of each token."""

from __future__ import annotations

import torch

from kvreclaim.engine.compact.recalls import Recalls
from kvreclaim.engine.extension import AttentionHook, Extension
from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.batch import AttentionBatch


class RecallExtension(Extension):
    """Recalls pages after the prompt, for sequences that have some. It writes recall blocks that a pass has
    allocated. They are never shared, because such a sequence is never forked."""

    rank = 30

    def __init__(self, recalls: Recalls, memory: MemoryManager, signals: Signals) -> None:
        self.recalls, self.memory, self.signals = recalls, memory, signals

    def is_due(self, seq: Sequence) -> bool:
        """Return whether the last queries choose pages now. They do not in a step with a pass."""
        recall = seq.footprint.recall
        return (
            recall is not None
            and recall.mode == "tokens"
            and seq.num_computed >= seq.num_prompt
            and recall.is_due(seq.num_computed)
            and seq.seq_id in self.recalls.tables
            and seq.account.last_computed < seq.num_computed
        )

    @torch.inference_mode()
    def choose(self, seq: Sequence) -> None:
        """Recall the best pages for the last queries, in all layers."""
        assert seq.footprint.recall is not None, "the request has no recall"
        window = seq.footprint.recall.every
        blocks, num_slots = self._table(seq)
        for layer in range(self.recalls.cache.num_layers):
            queries = None
            if seq.footprint.recall.needs_queries:
                queries = self.signals.queries_of(seq, layer, window)
            self._refresh(seq, layer, queries, blocks, num_slots)

    def processed(self, seq: Sequence) -> None:
        """Recall the best pages for the last queries, if a choice is due."""
        if self.is_due(seq):
            self.choose(seq)

    def forked(self, parent: Sequence, child: Sequence) -> None:
        self.recalls.fork(parent.seq_id, child.seq_id)

    def reset(self, seq_id: int) -> None:
        self.recalls.drop(seq_id)

    def released(self, seq_id: int) -> None:
        self.recalls.drop(seq_id)

    def attend(self, runs: list[Scheduled], batch: AttentionBatch | None) -> list[AttentionHook]:
        """Recall the best pages for the queries of the step, before they attend. A retried step chooses the
        same pages."""
        writes: list[AttentionHook] = []
        row = 0
        for item in runs:
            recall, start = item.seq.footprint.recall, row
            row += item.num_tokens
            if recall is None or recall.mode != "query" or item.seq.seq_id not in self.recalls.tables:
                continue
            if item.row.first >= item.seq.num_prompt:
                assert item.num_tokens == 1, f"{item.num_tokens} tokens at once, each with pages of its own"
                writes.append(self._write(item.seq, start))
        return writes

    def _write(self, seq: Sequence, row: int) -> AttentionHook:
        blocks, num_slots = self._table(seq)

        def write(call: AttentionCall) -> None:
            self._refresh(seq, call.layer, call.q[row][:, None], blocks, num_slots)

        return write

    def _refresh(
        self, seq: Sequence, layer: int, queries: torch.Tensor | None, blocks: torch.Tensor, num_slots: int
    ) -> None:
        compressor = seq.request.compressor
        assert compressor is not None, f"sequence {seq.seq_id} has no compression"
        fresh = self.recalls.refresh(seq.seq_id, layer, compressor, queries, blocks, num_slots)
        if fresh is not None:
            slots = self.recalls.slots(compressor)
            new = fresh.repeat_interleave(self.recalls.cache.block_size, -1)
            self.signals.clear_mass(seq, layer, slots, new)

    def _table(self, seq: Sequence) -> tuple[torch.Tensor, int]:
        """Return the block ids [blocks] int64, and the number of computed tokens in them."""
        table = self.memory.table(seq.seq_id)
        ids = [block for block in table.block_ids if block is not None]
        return torch.tensor(ids, device=self.recalls.cache.device), table.physical_len
