"""The memory as the scheduler sees it: the changes."""

from __future__ import annotations

from collections.abc import Sequence

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import NO_GROWTH, CompactionPlan, Growth, Shrunk
from kvreclaim.memory.pins import Retention
from kvreclaim.memory.prefix.keys import BlockKeys
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.memory.questions import MemoryQuestions
from kvreclaim.memory.residency import BlockResidency


class MemoryManager(MemoryQuestions):
    """Which sequence holds which blocks, in all groups of layers. Integers only: the caller moves every byte.

    A can_* method answers without changing anything; what follows a yes in the same step succeeds.
    A sequence id that is not known raises UnknownRequestError. Not thread-safe.
    """

    def admit(self, seq_id: int, match: PrefixMatch, *, priority: int = 0) -> None:
        """Begin a sequence with the blocks of a match that was made in this step.

        A pin of one of these blocks begins anew. priority: of the request, a lower number is more
        important; the eviction order may look at it.
        """
        self.full.refuse_known(seq_id)
        for group in self.groups:
            group.begin(seq_id, match, priority)
        self.offload.admitted(seq_id, self._tables[seq_id], match)

    def refresh(self, match: PrefixMatch) -> None:
        """Renew a match as if a sequence had just begun with it and ended: its blocks are reused later."""
        self.pool.hit(match.block_ids, 0)
        self.pool.release(reversed(match.block_ids))

    def pin(self, seq_id: int, retention: Sequence[Retention], owner: str | None = None) -> None:
        """Keep the full blocks of this sequence's beginning when others are reused, as long as
        max_pinned_fraction allows: the blocks beyond it, the last ones, are refused and counted, unless
        other owners have more pins than this one, which give way.

        To be called when the tokens in question have been computed; what is not indexed is not pinned.
        """
        self.prefix.pin(self._tables[seq_id], retention, owner)

    def fork(self, parent_id: int, child_id: int, keys: BlockKeys) -> None:
        """Begin a sequence that shares every written block of another; room past them is not shared.

        keys: of the child, a fork of its parent's
        """
        parent = self._tables[parent_id]
        self.full.refuse_known(child_id)
        child = parent.fork(blocks_for(parent.physical_len, self.block_size), keys)
        for group in self.groups:
            group.fork(parent_id, child_id, child)
        self.offload.forked(parent_id, child_id)

    def adopt(self, seq_id: int, table: BlockTable) -> list[int]:
        """Begin an inexact sequence that comes from elsewhere, and whose block ids stand for any blocks; as
        many are free. Returns: its blocks, for the caller to fill."""
        self.full.refuse_known(seq_id)
        assert table.chain is None, "what is exact is found by its prefix"
        assert not self.windows, "nothing that comes from elsewhere has windows"
        blocks = self.pool.allocate(table.num_blocks)
        supply = iter(blocks)
        table.block_ids = [None if block is None else next(supply) for block in table.block_ids]
        self.full.add(seq_id, table)
        return blocks

    def free(self, seq_id: int) -> int:
        """Forget a sequence and drop its references, tail first: a chain's head is reused last.

        Returns: blocks that went back to the pool.
        """
        table, freed = self._tables[seq_id], 0
        self.wake(seq_id)
        for group in self.groups:
            freed += group.free(seq_id, table)
        self.offload.freed(seq_id)
        return freed

    def rest(self, seq_id: int) -> None:
        """Let a sequence be idle: it does not run, and gives way when others need blocks, so what nobody else
        holds is not in use. Its table does not change until it wakes, or is freed."""
        if seq_id not in self._idle:
            self._idle.add(seq_id)
            self.pool.rest(self.blocks(seq_id))

    def wake(self, seq_id: int) -> None:
        """A sequence that may be idle is so no more; to be called before it is parked."""
        if seq_id in self._idle:
            self._idle.remove(seq_id)
            self.pool.wake(self.blocks(seq_id))

    def grow(self, seq_id: int, num_tokens: int, num_drafts: int = 0) -> Growth:
        """Make room to write num_tokens slots after physical_len; a shared tail block is replaced.
        num_drafts: of these tokens, the last ones, which are only guessed.

        Changes no length. Growing again before commit adds only what is still missing. The caller
        has asked can_grow first. The source of a copy is not handed out before `release_copy_sources`.
        """
        table = self._tables[seq_id]
        blocks: list[int] = []
        copies: list[tuple[int, int]] = []
        for group in self.groups:
            group.grow(seq_id, table, num_tokens, blocks, copies, num_drafts)
        if copies:
            self._cow_copies += len(copies)
            self.offload.copied(copies)
        return Growth(tuple(blocks), tuple(copies)) if blocks or copies else NO_GROWTH

    def release_copy_sources(self) -> None:
        """The copies that grow asked for have been made: their sources are no longer held for them."""
        if self._held:
            self.pool.release(self._held.elements())
            self._held.clear()
        self.offload.release_copy_sources()

    def trim(self, seq_id: int) -> int:
        """Give back the room that a sequence has behind what it has written, whole blocks of it. Returns:
        blocks that went back."""
        table = self._tables[seq_id]
        return self.pool.release(table.trim(blocks_for(table.physical_len, self.block_size)))

    def commit(self, seq_id: int, num_tokens: int, *, exact: bool = True) -> None:
        """The K/V of the next num_tokens tokens have been written; full blocks become hits, unless these
        tokens, and so all later ones, are not what full attention would give."""
        table = self._tables[seq_id]
        if not exact and table.exact:
            table.mark_inexact()
        for group in self.groups:
            group.commit(seq_id, table, num_tokens)
        self.offload.committed(seq_id, table)

    def shrink(self, plan: CompactionPlan[int]) -> Shrunk:
        """Give a sequence its planned table and release the other blocks, tail first: all or nothing.

        Fresh blocks are taken before any is released, so no source is a target by accident. The
        caller moves the bytes before anything else is allocated. The logical length stays.
        """
        return self.full.shrink(plan, self._tables[plan.seq_id])

    def release_out_of_window(self, seq_id: int, num_tokens: int) -> int:
        """Give back the full blocks of a sequence's first tokens, which no layer sees any more; they can be
        hit like any others. Nothing of it may be compressed later. Returns: blocks that went back."""
        return self.pool.release(self._tables[seq_id].release_out_of_window(num_tokens // self.block_size))

    def drop_blocks(self, seq_id: int, indices: Sequence[int]) -> int:
        """Give back the full blocks at these table entries, last first; later entries move up, and the
        physical length falls. No byte moves: of a shared block only the reference goes.

        Returns: blocks that went back to the pool.
        """
        return self.full.drop(seq_id, self._tables[seq_id], indices)

    def invalidate(self, seq_id: int) -> None:
        """Unindex a sequence's blocks: what they hold may be wrong, and no prefix hit may find them."""
        for block in self.blocks(seq_id):
            self.pool.unindex(block)
        self.offload.invalidated(seq_id, self._tables[seq_id])

    def mark_inexact(self, seq_id: int) -> None:
        """Something lossy happened: nothing written from here on is ever indexed."""
        self._tables[seq_id].mark_inexact()

    def reset_prefix_cache(self, *, external: bool = True) -> None:
        """Forget every indexed prefix; running sequences keep their blocks and are not indexed again.
        external: what lies below the pool is forgotten, too."""
        self.pool.clear_index()
        self.offload.reset(external=external)

    def drain_residency(self) -> list[BlockResidency]:
        """The last 8,192 sampled cached blocks that were reused since the last call."""
        return self.pool.residency.drain()
