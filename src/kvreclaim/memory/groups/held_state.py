"""What one sequence has of recurrent layers: a state of its own, or its target's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.checkpoints import Checkpoints


@dataclass(slots=True, eq=False)
class HeldState:
    """A sequence's state, and the slots that its next step writes.

    slot:    its state; None: it has computed nothing
    pending: slots that its next step writes: the first behind its known tokens, then one behind each draft
    num_known: tokens of that step that are no drafts
    stops:   lengths at which a step must end, for a checkpoint there
    end:     length of its prompt
    rolling: serial of the checkpoint in its answer, which the next one replaces
    """

    slots: Checkpoints
    end: int = 0
    slot: int | None = None
    pending: list[int] | None = None
    num_known: int = 0
    stops: tuple[int, ...] = ()
    rolling: int | None = None

    @property
    def own(self) -> HeldState:
        """The one that has the state which it goes on from: itself."""
        return self

    @property
    def held(self) -> list[int]:
        """References to slots."""
        return [*(self.pending or ()), *([] if self.slot is None else [self.slot])]

    def fork(self) -> HeldState:
        """One that shares the slot until it goes on."""
        slot = None if self.slot is None else self.slots.share(self.slot)
        return HeldState(self.slots, self.end, slot)

    def grow(self, num_known: int, num_drafts: int) -> None:
        """Slots for a step over so many tokens."""
        self.drop_pending()
        self.pending, self.num_known = [self.slots.take() for _ in range(1 + num_drafts)], num_known

    def drop_pending(self) -> None:
        self.slots.release(*(self.pending or ()))
        self.pending = None

    def commit(self, table: BlockTable, num_tokens: int) -> None:
        """So many tokens of the step stand: the state behind them takes the old one's place."""
        assert self.pending is not None, "a sequence was committed and has no state to replace its own"
        chosen = self.pending.pop(max(0, num_tokens - self.num_known))
        self.free()
        self.slot = chosen
        full, rest = divmod(table.logical_len, table.keys.block_size)
        if rest or table.chain is None or len(table.entries) != full:
            return
        entry = table.entries[-1]
        if table.logical_len in self.stops:
            self.slots.keep(entry, chosen)
        elif table.logical_len >= self.end:
            self.slots.drop(self.rolling)
            self.rolling = entry.serial if self.slots.keep(entry, chosen) else None

    def free(self) -> None:
        """Give its slots back."""
        self.drop_pending()
        if self.slot is not None:
            self.slots.release(self.slot)
        self.slot = None

    def check(self, table: BlockTable) -> None:
        assert (self.slot is None) == (table.logical_len == 0), f"{table.logical_len} tokens: {self.slot}"


class FollowedState(HeldState):
    """A companion has no state of its own: it goes on from its target's."""

    def __init__(self, of: Mapping[int, HeldState], target: int) -> None:
        """of: the states by their sequences"""
        super().__init__(of[target].slots)
        self._of, self._target = of, target

    @property
    def own(self) -> HeldState:
        return self._of[self._target]

    @property
    def held(self) -> list[int]:
        return []

    def fork(self) -> HeldState:
        return FollowedState(self._of, self._target)

    def grow(self, num_known: int, num_drafts: int) -> None: ...

    def commit(self, table: BlockTable, num_tokens: int) -> None: ...

    def free(self) -> None: ...

    def check(self, table: BlockTable) -> None: ...
