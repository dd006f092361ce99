"""Pages that come back between passes: by the last queries every so many tokens, or by each token's own."""

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
    """Brings pages back behind the prompt, for sequences that have some. The recall blocks that it writes are
    their own: a pass has put them there, and nobody forks such a sequence."""

    rank = 30

    def __init__(self, recalls: Recalls, memory: MemoryManager, signals: Signals) -> None:
        self.recalls, self.memory, self.signals = recalls, memory, signals

    def is_due(self, seq: Sequence) -> bool:
        """Whether the last queries choose pages now, after a step in which no pass has just done so."""
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
        """Bring back what the last queries want, in all layers."""
        assert seq.footprint.recall is not None, "asked of recall alone"
        window = seq.footprint.recall.every
        blocks, num_slots = self._table(seq)
        for layer in range(self.recalls.cache.num_layers):
            queries = None
            if seq.footprint.recall.needs_queries:
                queries = self.signals.queries_of(seq, layer, window)
            self._refresh(seq, layer, queries, blocks, num_slots)

    def processed(self, seq: Sequence) -> None:
        """Bring back what the last queries want, if a choice is due."""
        if self.is_due(seq):
            self.choose(seq)

    def forked(self, parent: Sequence, child: Sequence) -> None:
        self.recalls.fork(parent.seq_id, child.seq_id)

    def reset(self, seq_id: int) -> None:
        self.recalls.drop(seq_id)

    def released(self, seq_id: int) -> None:
        self.recalls.drop(seq_id)

    def attend(self, runs: list[Scheduled], batch: AttentionBatch | None) -> list[AttentionHook]:
        """Bring back what the queries of the step want, before they attend. A step that is tried again
        chooses the same."""
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
        """[blocks] int64 ids, and the tokens that are computed and lie there."""
        table = self.memory.table(seq.seq_id)
        ids = [block for block in table.block_ids if block is not None]
        return torch.tensor(ids, device=self.recalls.cache.device), table.physical_len
