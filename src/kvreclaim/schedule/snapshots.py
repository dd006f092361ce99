"""Compressed prefixes: what a pass left of a prompt's beginning, kept for whoever begins so, too.

A snapshot is a hidden sequence. It shares the blocks of the one that it was taken of, and whoever begins with
it is its fork. It never stands in the prefix index, and nothing behind it does.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic

from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.tiers.manager import TieredMemory
from kvreclaim.schedule.queue import Seq


class Snapshots(Generic[Seq]):
    """By key, the least recently used first. A key names everything that the content depends on, the tokens
    themselves included, so keys are compared, not trusted.

    Where blocks lack, a snapshot goes to the host, if the memory has slots for it, or is dropped.

    Args:
        max_blocks: that all of them may hold together; 0: none is kept
    """

    def __init__(self, memory: MemoryManager, max_blocks: int) -> None:
        self.memory = memory
        self.max_blocks = max_blocks
        self.num_hits = self.num_taken = self.num_dropped = 0
        self._held: dict[Hashable, Seq] = {}
        self._gone: list[Seq] = []
        self._parked: list[Seq] = []
        self._used: list[Seq] = []

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._held.values())

    @property
    def num_blocks(self) -> int:
        """That they hold, shared ones included."""
        return sum(self.memory.table(seq.seq_id).num_blocks for seq in self if not self.is_parked(seq))

    def is_parked(self, seq: Seq) -> bool:
        """Whether it lies on the host."""
        return isinstance(self.memory, TieredMemory) and self.memory.is_parked(seq.seq_id)

    def find(self, seq: Seq) -> Seq | None:
        """The snapshot that a sequence that waits could begin with."""
        found = self._held.get(seq.snapshot_key) if seq.snapshot_key is not None else None
        if (
            found is None
            or found in self._parked
            or (seq.most_hit is not None and seq.most_hit < found.num_computed)
        ):
            return None
        return found

    def keep(self, parent: Seq, hidden: Seq) -> bool:
        """Keep what a sequence is now, in a hidden one that bears its key. Returns: whether there is room."""
        held = self.memory.table(parent.seq_id).num_blocks
        if hidden.snapshot_key in self._held or held > self.max_blocks:
            return False
        while self.num_blocks + held > self.max_blocks and self.give_way():
            pass
        if self.num_blocks + held > self.max_blocks:
            return False
        assert parent.keys is not None, f"sequence {parent.seq_id} was not added"
        hidden.keys = parent.keys.fork(hidden.token_ids)
        hidden.num_computed, hidden.account = parent.num_computed, parent.account.fork()
        self.memory.fork(parent.seq_id, hidden.seq_id, hidden.keys)
        self._held[hidden.snapshot_key] = hidden
        self.num_taken += 1
        return True

    def begin(self, snapshot: Seq, seq: Seq) -> None:
        """Let a sequence be its fork; the snapshot is in blocks, and there is room for what comes."""
        assert seq.keys is not None, f"sequence {seq.seq_id} was not added"
        self._held[snapshot.snapshot_key] = self._held.pop(snapshot.snapshot_key)  # behind the others
        self.memory.fork(snapshot.seq_id, seq.seq_id, seq.keys)
        seq.num_computed, seq.account = snapshot.num_computed, snapshot.account.fork()
        self._used.append(snapshot)
        self.num_hits += 1

    def give_way(self, spare: Seq | None = None) -> bool:
        """Have the blocks of the least recently used one that is not on the host already; not of `spare`, nor
        of one that a sequence has begun with in this step. Returns: whether there was one."""
        for seq in self:
            if seq is not spare and seq not in self._used and not self.is_parked(seq):
                if isinstance(self.memory, TieredMemory) and self.memory.park(seq.seq_id):
                    self._parked.append(seq)
                else:
                    self._drop(seq)
                return True
        return False

    def drop(self, key: Hashable) -> None:
        """Forget one that may be here."""
        if key in self._held:
            self._drop(self._held[key])

    def clear(self) -> None:
        """Forget all."""
        for seq in list(self):
            self._drop(seq)

    def take_gone(self) -> list[Seq]:
        """Those that were dropped since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def take_parked(self) -> list[Seq]:
        """Those that went to the host since the last call, which ends a step."""
        parked, self._parked = self._parked, []
        self._used.clear()
        return parked

    def _drop(self, seq: Seq) -> None:
        del self._held[seq.snapshot_key]
        if isinstance(self.memory, TieredMemory) and self.memory.is_parked(seq.seq_id):
            self.memory.drop_parked(seq.seq_id)
        else:
            self.memory.free(seq.seq_id)
        self._gone.append(seq)
        self.num_dropped += 1
