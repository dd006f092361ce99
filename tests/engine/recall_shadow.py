"""A shadow that follows where every token of a sequence with recall is.

Attention is compared with plain attention over the tokens that are said to lie in the slots: a page that
holds other tokens than it says shows as a difference, a token in two places as a broken partition.
"""

from __future__ import annotations

import torch
from shadow import Shadow

from kvreclaim.engine.compact.job import CompactionResult


class Recalling(Shadow):
    """Of sequences with recall and others; to be mixed into any shadow."""

    def __init__(self, llm, monkeypatch) -> None:
        self.recalls = llm.engine.recalls
        self.most_back = 0
        super().__init__(llm, monkeypatch)

    def _watch_compression(self, llm, monkeypatch) -> None:
        run = llm.engine.compression.run

        def watched_run(jobs):
            outcomes = run(jobs)
            for job, outcome in zip(jobs, outcomes, strict=True):
                if job.seq.seq_id not in llm.engine.lifecycle.sequences:
                    continue  # a companion's
                history = self.histories[job.seq.seq_id]
                if isinstance(outcome, CompactionResult):
                    history.num_exact = min(history.num_exact, job.seq.num_computed)
                    self._follow(history, outcome)
                    table = self._table(job.seq)
                    if table is not None:
                        history.live = torch.cat([history.live, table.hot_positions.long()], -1)
                        self.check_partition(job.seq.seq_id, job.seq.num_computed)
            return outcomes

        monkeypatch.setattr(llm.engine.compression, "run", watched_run)

    def _compare(self, call, out, latent=None) -> None:
        for item in self._step:
            table = self._table(item.seq)
            if table is not None:
                history, recall = self.histories[item.seq.seq_id], item.seq.footprint.recall
                end = item.seq.footprint.budget
                history.live = history.live.clone()
                history.live[..., end - recall.slots(self.size) : end] = table.hot_positions.long()
        super()._compare(call, out, latent)

    def _table(self, seq):
        return None if self.recalls is None else self.recalls.tables.get(seq.seq_id)

    def check_partition(self, seq_id: int, num_computed: int) -> None:
        """Each token of each head is attended to, or lies in a page, or waits, or is dropped: once."""
        table, live = self.recalls.tables[seq_id], self.histories[seq_id].live
        cold = torch.ones(table.rows.shape, dtype=torch.bool)
        cold.scatter_(-1, table.hot.cpu(), False)
        assert (~cold).sum(-1).eq(table.hot.shape[-1]).all(), "a page is back twice"
        for layer in range(len(live)):
            for head in range(live.shape[1]):
                pages = table.positions[layer, head][cold[layer, head]].flatten()
                waits = table.waiting.positions[layer, head] if table.waiting is not None else pages[:0]
                places = torch.cat([live[layer, head], pages, waits]).tolist()
                assert len(set(places)) == len(places), "a token is in two places"
                dropped = num_computed - len(places)
                assert dropped == table.dropped * self.size, f"{dropped} tokens are nowhere"
                assert set(places) <= set(range(num_computed))
        self.most_back = max(self.most_back, int(table.hot.numel()))


class RecallShadow(Recalling, Shadow):
    """Of an engine that has nothing else."""
