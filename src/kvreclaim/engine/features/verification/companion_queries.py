"""Signals for companions' policies, from the queries over full caches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvreclaim.compression.compressor import needs_of
from kvreclaim.compression.policy import Signal
from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.engine.signals.observer import score_write
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots

QUERIES = frozenset({Signal.RECENT_QUERIES, Signal.ATTENTION_MASS})


class CompanionQueries:
    """Queries of one step's targets by layer, for companions with policies that need queries or attention.
    They are kept until the tokens have been copied. Token scores are stored with their slots."""

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self._rows: dict[int, tuple[int, Tensor]] = {}
        self._seen: dict[int, Tensor] = {}
        self._starts: dict[int, tuple[int, int]] = {}

    def watch(
        self, step: list[Scheduled], batch: AttentionBatch | None
    ) -> list[Callable[[AttentionCall], None]]:
        """Return hooks for the attention calls of a step. batch: None where full caches are in host memory;
        no policy needs scores there."""
        self.clear()
        rows: list[Tensor] = []
        start = taken = 0
        scored: list[int] = []
        for place, item in enumerate(step):
            verify, count = item.seq.request.verify, item.num_tokens
            if verify is not None:
                needs = needs_of(verify.compressor)
                if needs & QUERIES:
                    rows.append(torch.arange(start, start + count))
                    self._starts[item.seq.seq_id] = item.row.first, taken
                    taken += count
                if Signal.TOKEN_SCORES in needs:
                    scored.append(place)
            start += count
        found = [] if batch is None else [self._score_write(step, place, batch) for place in scored]
        if rows:
            kept = torch.cat(rows).to(self.signals.cache.device)

            def see(call: AttentionCall) -> None:
                self._seen[call.layer] = call.q[kept]

            found.append(see)
        return found

    def _score_write(
        self, step: list[Scheduled], place: int, batch: AttentionBatch
    ) -> Callable[[AttentionCall], None]:
        verify = step[place].seq.request.verify
        assert verify is not None, "only targets are watched"
        return score_write(self.signals.scores, verify.compressor, [place], batch)

    def clear(self) -> None:
        """Forget the queries of the step."""
        self._seen, self._starts = {}, {}

    def first(self, target: Sequence) -> int:
        """Return the position of the target's first recorded row, or num_computed if none was recorded."""
        return self._starts[target.seq_id][0] if target.seq_id in self._starts else target.num_computed

    def begins(self, target: Sequence) -> bool:
        """Return whether this step has computed all of the target's tokens."""
        return target.seq_id in self._starts and self._starts[target.seq_id][0] == 0

    def note(self, target: Sequence, companion: Sequence, first: int, slots: SequenceSlots | None) -> None:
        """Pass the queries of tokens from `first` on to the companion, which has them last, in these slots.
        slots: None if it has no tokens yet; then it gets the queries of all tokens that were computed."""
        known = self._starts.get(target.seq_id)
        if known is None or first < known[0]:
            return
        start = known[1] + first - known[0]
        count = target.num_computed - first if slots is None else slots.query_len
        queries = {layer: q[start : start + count] for layer, q in self._seen.items()}
        self.signals.note(companion, first, queries, slots)
