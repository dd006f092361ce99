"""How many state slots a recurrent group has, and what holds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Sizes of a recurrent group.

    num_slots:       in all: `each` for each running sequence, and the checkpoints
    num_checkpoints: slots kept for prefix hits at most
    interval:        tokens of a prompt between checkpoints; 0: none between
    each:            two at least; num_drafts: of these, for drafts
    """

    num_slots: int
    num_checkpoints: int = 0
    interval: int = 0
    each: int = 2
    num_drafts: int = 0

    @classmethod
    def of(
        cls,
        max_num_seqs: int,
        each: int = 2,
        checkpoints: int | None = None,
        interval: int = 0,
        num_drafts: int = 0,
    ) -> StateSlots:
        """each: slots of a running sequence; checkpoints: None: as many as sequences"""
        kept = max_num_seqs if checkpoints is None else checkpoints
        return cls(each * max_num_seqs + kept, kept, interval, each, num_drafts)


@dataclass(frozen=True, slots=True)
class StateCounts:
    """Slots that sequences hold, that only prefix hits can use, and free ones; checkpoints: that prefix hits
    can use, whoever holds them, too."""

    in_use: int = 0
    cached: int = 0
    free: int = 0
    checkpoints: int = 0

    @property
    def slots(self) -> dict[str, int]:
        """Slots by state."""
        return {"in_use": self.in_use, "cached": self.cached, "free": self.free}


NO_STATES = StateCounts()


def most_sequences(room: int, each: int = 2, checkpoints: int | None = None) -> int:
    """How many sequences can run where there is room for so many slots; arguments as of StateSlots.of."""
    return room // (each + 1) if checkpoints is None else max(0, room - checkpoints) // each
