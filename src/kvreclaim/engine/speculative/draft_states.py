"""States of a draft model's recurrent layers, one after each draft of a sequence until verification."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvreclaim.engine.request.request import Scheduled
from kvreclaim.model.recurrent import RecurrentLayers
from kvreclaim.ops.states import StateRun, StateStep, StateStore


class DraftStates:
    """Lengths with a stored state and their slots, per sequence, ascending: the committed length, that of the
    known tokens, and those of drafts."""

    def __init__(self, layers: RecurrentLayers, store: StateStore, num_slots: int) -> None:
        self.layers, self.store = layers, store
        self._free = list(range(num_slots))
        self._held: dict[int, list[tuple[int, int]]] = {}

    def back_to(self, seq_id: int, length: int) -> int:
        """Keep the longest state of at most `length` tokens. Returns: its length; 0: none."""
        held = self._held.pop(seq_id, [])
        kept = max((one for one in held if one[0] <= length), default=None)
        self._free += [slot for at, slot in held if kept is None or at != kept[0]]
        if kept is None:
            return 0
        self._held[seq_id] = [kept]
        return kept[0]

    def forget(self, seq_id: int) -> None:
        """Free a sequence's slots."""
        self._free += [slot for _, slot in self._held.pop(seq_id, [])]

    @contextmanager
    def stepping(self, step: list[Scheduled], num_known: dict[int, int]) -> Iterator[None]:
        """Store states of a pass over these tokens, which follow each sequence's last state. A failed pass
        stores none. num_known: tokens that are not drafts, by seq_id."""
        runs, start = list[StateRun](), 0
        for item in step:
            held = self._held.setdefault(item.seq.seq_id, [])
            last, slot = held[-1] if held else (0, None)
            assert last == item.row.first, f"the state is behind {last} tokens of {item.row.first}"
            runs.append(StateRun(start, item.num_tokens, slot, [self._free.pop()]))
            start += item.num_tokens
        try:
            with self.layers.stepping(StateStep(self.store, runs)):
                yield
        except BaseException:
            self._free += [run.writes[0] for run in runs]
            raise
        for item, run in zip(step, runs, strict=True):
            held, end = self._held[item.seq.seq_id], item.row.first + item.num_tokens
            held.append((end, run.writes[0]))
            if end <= num_known[item.seq.seq_id] and len(held) > 2:
                self._free.append(held.pop(-2)[1])  # between two chunks of a prompt
