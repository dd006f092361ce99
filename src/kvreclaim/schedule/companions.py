"""Companions: compressed caches of sequences that also have a full cache. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import Growth
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.schedule.budget.compaction import Pass
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.budget.ledger import compress
from kvreclaim.schedule.queue import Seq
from kvreclaim.schedule.sequence import Status


class Companions(Generic[Seq]):
    """Companions by their target sequence, in the order of their start.

    A target's answer does not depend on its companion, so companions are evicted before anything else, the
    last one first. A target without one continues, and may get another one later.

    memory: of the companions' blocks, the targets' own or another one
    gone:   evicted companions, for their other owners to forget
    """

    def __init__(self, memory: MemoryManager) -> None:
        self.memory = memory
        self.gone: list[Seq] = []
        self._held: dict[int, Seq] = {}

    def __iter__(self) -> Iterator[Seq]:
        return iter(list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, target: Seq) -> Seq | None:
        """Return the target's companion."""
        return self._held.get(target.seq_id)

    def begin(self, target: Seq, companion: Seq) -> None:
        """Start an empty companion."""
        companion.keys = self.memory.keys(companion.token_ids)
        empty = BlockTable.of_inexact(companion.keys, (), logical_len=0, physical_len=0, exact_len=0)
        self.memory.adopt(companion.seq_id, empty)
        self._hold(target, companion)

    def fork(self, target: Seq, companion: Seq, parent: Seq) -> None:
        """Start a companion that shares all blocks and lengths of another one."""
        assert parent.keys is not None, f"sequence {parent.seq_id} has not begun"
        companion.keys = parent.keys.fork(companion.token_ids)
        companion.num_computed, companion.account = parent.num_computed, parent.account.fork()
        self.memory.fork(parent.seq_id, companion.seq_id, companion.keys)
        self._hold(target, companion)

    def _hold(self, target: Seq, companion: Seq) -> None:
        if self.memory.recurrent is not None:
            self.memory.recurrent.follow(companion.seq_id, target.seq_id)
        companion.status = Status.RUNNING
        self._held[target.seq_id] = companion

    def has_room(self, target: Seq, footprint: Footprint, num_drafts: int) -> bool:
        """Whether there are blocks for a companion up to the target's length, and for the next token of
        all."""
        slots = footprint.slots_needed(target.num_prompt, len(target.token_ids))
        if footprint.bounded:
            slots = max(slots, min(footprint.decode_cap, target.max_len))
        spare = len(self._held) + 1
        return blocks_for(slots + num_drafts, self.memory.block_size) + spare <= self.memory.num_free

    def grow(self, companion: Seq, num_tokens: int) -> Growth | None:
        """Allocate room for that many tokens; None: no room."""
        if not self.memory.can_grow(companion.seq_id, num_tokens):
            return None
        return self.memory.grow(companion.seq_id, num_tokens)

    def commit(self, companion: Seq, num_tokens: int) -> None:
        """Record that many written tokens."""
        self.memory.commit(companion.seq_id, num_tokens, exact=False)
        companion.num_computed += num_tokens

    def compress(self, companion: Seq) -> Pass[int] | None:
        """Plan its pass, if it is due and has the blocks; table and lengths are changed at return. Room for
        drafts is freed first."""
        self.memory.trim(companion.seq_id)
        return compress(
            companion.seq_id,
            companion.num_computed,
            companion.num_prompt,
            companion.footprint,
            companion.account,
            self.memory,
        )

    def evict_one(self) -> bool:
        """Evict the last one. Returns: whether there was one."""
        if not self._held:
            return False
        target_id = next(reversed(self._held))
        self.gone.append(self._held[target_id])
        self.leave(target_id)
        return True

    def leave(self, target_id: int) -> Seq | None:
        """Remove the companion of a target. Returns: the companion."""
        companion = self._held.pop(target_id, None)
        if companion is not None:
            companion.status = Status.ENDED
            self.memory.free(companion.seq_id)
        return companion
