"""The shadow with scores of tokens: remembers what hidden states gave each token at its logical position, and
compares after every step and every pass what lies beside each slot, head by head."""

from __future__ import annotations

import torch
from shadow import History, Shadow
from torch import Tensor

from kvreclaim import LLM
from kvreclaim.compression.kvzap import token_scores
from kvreclaim.compression.policy import Signal
from kvreclaim.engine.attend.cell_tables import head_cells
from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.engine.signals.slot_scores import DTYPE
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.cell_tables import head_lengths

OFF = 2.0**-5
"""Two computations of the same token may fall to either side of a boundary of fp16, up to 2^-6 wide here."""


class ScoreShadow(Shadow):
    """num_compared: slots whose scores were compared; wrong also lists those that differ."""

    def __init__(self, llm: LLM, monkeypatch) -> None:
        self.scores: dict[int, dict[int, Tensor]] = {}
        self.kept_scores: dict[object, dict[int, Tensor]] = {}
        self.shared: dict[tuple[str | None, tuple[int, ...]], Tensor] = {}
        self.num_compared = 0
        super().__init__(llm, monkeypatch)
        self._watch_steps(llm, monkeypatch)

    def _watch_memory(self, llm: LLM, monkeypatch) -> None:
        super()._watch_memory(llm, monkeypatch)
        fork = llm.engine.memory.fork
        snapshots = llm.engine.scheduler.snapshots
        keep = snapshots.keep

        def watched_fork(parent_id, child_id, *args):
            if parent_id not in self.scores and parent_id in llm.engine.snapshots.held:
                key = llm.engine.snapshots.held[parent_id].snapshot_key  # it came from disk
                self.scores[parent_id] = self.kept_scores.get(key, {})
            self.scores[child_id] = dict(self.scores.get(parent_id, {}))
            return fork(parent_id, child_id, *args)

        def watched_keep(parent, hidden):
            is_kept = keep(parent, hidden)
            if is_kept:
                self.kept_scores[hidden.snapshot_key] = self.scores[hidden.seq_id]
            return is_kept

        monkeypatch.setattr(snapshots, "keep", watched_keep)
        monkeypatch.setattr(llm.engine.memory, "fork", watched_fork)

    def _watch_steps(self, llm: LLM, monkeypatch) -> None:
        step = llm.engine.step

        def watched_step():
            result = step()
            for item in llm.engine.scheduler.running:
                if _has_scores(item) and item.seq_id in self.histories and item.num_computed:
                    self._compare_scores(item)
            return result

        monkeypatch.setattr(llm.engine, "step", watched_step)

    def _begin(self, seq: Sequence) -> History:
        """A hit brings what was computed with these very tokens, under the same salt and weights."""
        history = super()._begin(seq)
        self.scores[seq.seq_id] = {}
        if _has_scores(seq) and seq.num_computed:
            key = (seq.cache_salt, tuple(seq.token_ids[: seq.num_computed]))
            if key in self.shared:
                self.scores[seq.seq_id] = dict(enumerate(self.shared[key]))
            else:
                self.wrong.append(f"{seq.request.request_id} hits blocks without scores")
        return history

    def _remember(self, item: Scheduled, call: AttentionCall, rows: slice) -> History:
        history = super()._remember(item, call, rows)
        seq, start, compressor = item.seq, item.seq.num_computed, item.seq.request.compressor
        place = self.groups.places[call.layer]
        if _has_scores(seq) and not place.table:
            assert call.hidden is not None
            new = token_scores(call.hidden[rows], compressor.stats[place.layer]).T.to(DTYPE).float()
            old = self.scores[seq.seq_id].get(place.layer, new[:, :0])[:, :start]
            assert old.shape[1] == start
            self.scores[seq.seq_id][place.layer] = torch.cat([old, new], 1)
        return history

    def _cut(self, seq: Sequence) -> None:
        super()._cut(seq)
        own = self.scores[seq.seq_id]
        self.scores[seq.seq_id] = {layer: found[:, : seq.num_computed] for layer, found in own.items()}

    def _note_contents(self, item: Scheduled, end: int) -> None:
        super()._note_contents(item, end)
        if not _has_scores(item.seq):
            return
        seq, history = item.seq, self.histories[item.seq.seq_id]
        own = torch.stack([self.scores[seq.seq_id][layer] for layer in range(self.groups.facts.num_layers)])
        for end in range(self.size, history.num_noted + 1, self.size):
            self.shared[seq.cache_salt, tuple(seq.token_ids[:end])] = own[..., :end]

    def _compare_scores(self, seq: Sequence) -> None:
        history = self.histories[seq.seq_id]
        for layer in range(self.groups.facts.num_layers):
            found = self._beside(seq, layer)
            for head, positions in enumerate(history.attended(layer)):
                want = self.scores[seq.seq_id][layer][head, positions]
                self.num_compared += len(want)
                near = {"rtol": 0.0, "atol": OFF, "equal_nan": True}
                if found[head].shape != want.shape or not torch.allclose(found[head], want, **near):
                    self.wrong.append(f"{seq.request.request_id}, layer {layer}, head {head}: other scores")

    def _beside(self, seq: Sequence, layer: int) -> list[Tensor]:
        """[n] of each head: what lies beside the slots that it attends to."""
        memory, store = self.llm.engine.memory, self.llm.engine.signals.scores
        if seq.state.cells is not None:
            num_slots = memory.table(seq.seq_id).physical_len
            lengths = head_lengths(seq.state.cells, num_slots, self.cache)[layer].tolist()
            cells = torch.from_numpy(head_cells(seq, memory, self.cache)[layer]).long()
            return [store.of_cells(row, n)[0] for row, n in zip(cells, lengths, strict=True)]
        table = memory.table(seq.seq_id)
        return list(store.of(layer, torch.from_numpy(seq.block_row(table)).long(), table.physical_len))


def _has_scores(seq: Sequence) -> bool:
    compressor = seq.request.compressor
    return compressor is not None and Signal.TOKEN_SCORES in compressor.policy.needs
