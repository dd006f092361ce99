"""The memory manager: ownership of blocks by sequences."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

from kvreclaim.checks import check_number
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import NO_GROWTH, CompactionPlan, Growth, Shrunk, TableState
from kvreclaim.memory.check import check_counts
from kvreclaim.memory.eviction import DEFAULT_ORDER, EvictionOrder, make_order
from kvreclaim.memory.groups.full import FullAttentionGroup
from kvreclaim.memory.groups.group import GroupManager
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.groups.state_slots import NO_STATES, StateSizes
from kvreclaim.memory.groups.window import WindowGroup
from kvreclaim.memory.offload import OffloadSlots
from kvreclaim.memory.pins import Retention
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import BlockHash, BlockKeys, Entry, HashFunction, PrefixIndex, sha256
from kvreclaim.memory.prefix_cache import PrefixCache, PrefixMatch
from kvreclaim.memory.stats import MemoryStats, memory_stats
from kvreclaim.memory.windows import Window


class MemoryManager:
    """Blocks that sequences hold, in all groups of layers. Integers only: the caller moves every byte.

    A can_* method changes nothing; the change that it allows succeeds in the same step. An unknown sequence
    id raises UnknownRequestError. Not thread-safe.

    Args:
        num_blocks:            blocks in the pool, >= 1
        block_size:            slots per block, >= 1
        enable_prefix_caching: False hashes nothing and makes every match empty
        fingerprint:           other inputs of the KV than the tokens (model, dtype, KV format)
        hash_function:         hash of the prefix chain; tests inject one that collides
        eviction_policy:       order in which cached blocks are reused: a name or an object
        max_pinned_fraction:   largest share of the pool that may be pinned at a time, 0 to 1
        clock:                 monotonic seconds, for pins
        windows:               windows of layers that see the last tokens only; each has a group in groups/
        window_group:          the class of these groups
        states:                slots of recurrent layers; None: the model has none
        offload:               makes the tiers below the pool: `partial(TieredOffload, num_host_slots=...)`
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        fingerprint: str = "",
        hash_function: HashFunction = sha256,
        eviction_policy: str | EvictionOrder = DEFAULT_ORDER,
        max_pinned_fraction: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        windows: Sequence[Window] = (),
        window_group: type[WindowGroup] = WindowGroup,
        states: StateSizes | None = None,
        offload: Callable[[FullAttentionGroup, RecurrentGroup | None], OffloadSlots] = OffloadSlots,
    ) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size is {block_size}; at least 1 slot is needed; use 16")
        check_number("max_pinned_fraction", max_pinned_fraction, 0, 1)
        if isinstance(eviction_policy, str):
            eviction_policy = make_order(eviction_policy, max(num_blocks, 0))
        self.block_size = block_size
        self.pool = BlockPool(
            num_blocks,
            PrefixIndex(num_blocks),
            order=eviction_policy,
            max_pinned=int(max_pinned_fraction * num_blocks),
            clock=clock,
        )
        self.prefix = PrefixCache(self.pool, block_size, enabled=enable_prefix_caching)
        self._held: Counter[int] = Counter()
        self.full = FullAttentionGroup(self.pool, block_size, self._held, self.prefix)
        self.windows = tuple(
            window_group(self.pool, block_size, self._held, window, n) for n, window in enumerate(windows)
        )
        self.recurrent = None if states is None else RecurrentGroup(self.pool, block_size, self._held, states)
        groups = (self.full, *self.windows, self.recurrent)
        self.groups: tuple[GroupManager, ...] = tuple(group for group in groups if group is not None)
        self.offload = offload(self.full, self.recurrent)
        assert not (windows and self.offload.num_slots), "windows have no slots; all layers share one table"
        self._idle: set[int] = set()
        self._hashing = BlockHash(block_size, fingerprint, hash_function)
        self._tables = self.full.tables
        self._cow_copies = 0

    # Reads: these change nothing.

    def table(self, seq_id: int) -> BlockTable:
        """Return the sequence's live table; read-only for callers."""
        return self._tables[seq_id]

    @property
    def num_free(self) -> int:
        """Blocks without references."""
        return self.pool.num_free

    @property
    def num_in_use(self) -> int:
        """Blocks that active sequences hold."""
        return self.pool.num_in_use

    @property
    def num_idle(self) -> int:
        """Blocks that only idle sequences hold."""
        return self.pool.num_idle

    @property
    def max_idle(self) -> int | None:
        """Sequences that may be idle at a time: each takes the state slot of a checkpoint. None: any."""
        return None if self.recurrent is None else self.recurrent.sizes.num_checkpoints

    @property
    def num_pool_blocks(self) -> int:
        """All blocks."""
        return self.pool.num_blocks

    def ref_count(self, block: int) -> int:
        """References to a block."""
        return self.pool.refs[block]

    def table_state(self, seq_id: int) -> TableState:
        """Return the sequence's table as input of a compaction plan."""
        return self.full.table_state(self._tables[seq_id])

    def indexed_len(self, seq_id: int) -> int:
        """Return the leading tokens that were ever in the prefix index, evicted ones included."""
        return len(self._tables[seq_id].entries) * self.block_size

    def publishes(self, seq_id: int) -> bool:
        """Return whether the next full block of the sequence enters the prefix index."""
        return self._tables[seq_id].chain is not None

    def follows_itself(self, seq_id: int) -> bool:
        """Return whether the next full block of the sequence, if entered, follows one that the sequence
        holds. Evictions of other blocks before it then make no difference, unless another sequence samples
        the same tokens."""
        table = self._tables[seq_id]
        if not isinstance(table.chain, Entry):
            return True
        return table.chain.block == table.block_ids[len(table.entries) - 1]

    @property
    def index_version(self) -> int:
        """Counter that increases whenever a match may have changed."""
        states = 0 if self.recurrent is None else self.recurrent.version
        return self.pool.index.version + self.offload.index_version + states

    def blocks(self, seq_id: int) -> list[int]:
        """Return all blocks that a sequence holds."""
        table = self._tables[seq_id]
        return [block for group in self.groups for block in group.blocks(seq_id, table)]

    def num_blocks(self, seq_id: int) -> int:
        """Return the number of blocks that a sequence holds."""
        table, count = self._tables[seq_id], 0
        for group in self.groups:
            count += group.num_blocks(seq_id, table)
        return count

    def keys(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, lasting: bool = True
    ) -> BlockKeys:
        """Make the keys of a new sequence's blocks, for its whole life. token_ids: the sequence's own list,
        which only grows at its end"""
        return BlockKeys(self._hashing, token_ids, cache_salt, lasting=lasting)

    def match_prefix(self, keys: BlockKeys, *, max_tokens: int | None = None) -> PrefixMatch:
        """Return the longest indexed run of full blocks at the beginning of these keys' prompt.

        At least one token is left to compute, and max_tokens is not exceeded. No statistic changes.
        """
        match = self.prefix.match(keys, max_tokens)
        length, before, miss = len(match.entries), -1, match.miss
        while length != before:
            before = length
            for group in self.groups[1:]:
                if (fitting := group.fit(match.entries, length)) < length:
                    length, miss = fitting, group.miss
        entries = match.entries[:length]  # behind which every window and the recurrent state are there
        rows = tuple(group.hits(entries) for group in self.windows)
        found = PrefixMatch(match.keys, entries, miss, windows=rows, num_indexed=len(match.entries))
        return self.offload.with_lower(found, match, max_tokens)

    def can_admit(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Return whether admit and then grow(num_tokens) would succeed."""
        return blocks_for(num_tokens, self.block_size) <= self.num_spare(match)

    def num_spare(self, match: PrefixMatch) -> int:
        """Return the blocks that are free besides those of a match: a queued hit is no longer free."""
        refs = self.pool.refs
        queued = sum(not refs[block] for block in match.window_blocks)
        return self.pool.num_free - (len(match.entries) - self.num_shared(match)) - queued

    def num_shared(self, match: PrefixMatch) -> int:
        """Return the blocks of a match that other sequences hold now."""
        return sum(1 for entry in match.entries if self.pool.refs[entry.block])

    def num_shared_of(self, seq_id: int) -> int:
        """Return the blocks of a sequence's table that other sequences also hold."""
        refs = self.pool.refs
        return sum(block is not None and refs[block] > 1 for block in self._tables[seq_id].block_ids)

    def num_to_fork(self, parent: BlockTable, num_tokens: int) -> int:
        """Return the blocks that a fork needs to grow by num_tokens, with a copy of the last one."""
        end = blocks_for(parent.physical_len + num_tokens, self.block_size)
        return end - parent.physical_len // self.block_size

    def first_lacking(self, passes: Iterable[tuple[int, int]], unsure: Container[int] = ()) -> int | None:
        """Return the index of the first pass that would lack blocks; None if none would.

        passes: (sequence, tokens that it keeps), applied in this order after the copies of this step. A pass
                may take blocks that an earlier one has freed.
        unsure: sequences that may have no pass; the blocks that they would free are not counted
        """
        return self.full.first_lacking(passes, unsure)

    def has_room(self, seq_id: int, num_tokens: int) -> bool:
        """Return whether the blocks hold num_tokens more without grow. May be False although they do."""
        table = self._tables[seq_id]
        return all(group.has_room(seq_id, table, num_tokens) for group in self.groups)

    def can_grow(self, seq_id: int, num_tokens: int) -> bool:
        """Return whether grow would succeed."""
        table, missing = self._tables[seq_id], 0
        for group in self.groups:
            missing += group.missing(seq_id, table, num_tokens)
        return missing <= self.pool.num_free

    def stops(self, seq_id: int) -> tuple[int, ...]:
        """Return the lengths at which a sequence's steps must end to keep its recurrent state there."""
        return () if self.recurrent is None else self.recurrent.stops(seq_id)

    def admit(self, seq_id: int, match: PrefixMatch, *, priority: int = 0) -> None:
        """Begin a sequence with the blocks of a match that was made in this step. Renews the pins of these
        blocks. priority: of the request, lower is more important; an input of the eviction order"""
        self.full.refuse_known(seq_id)
        for group in self.groups:
            group.begin(seq_id, match, priority)
        self.offload.admitted(seq_id, self._tables[seq_id], match)

    def pin(self, seq_id: int, retention: Sequence[Retention], owner: str | None = None) -> None:
        """Pin the full blocks of this sequence's beginning against reuse, up to max_pinned_fraction. Blocks
        beyond it are refused and counted, unless another owner has more pins than this one and loses some.
        Only indexed blocks are pinned, so call this once these tokens have been computed."""
        self.prefix.pin(self._tables[seq_id], retention, owner)

    def fork(self, parent_id: int, child_id: int, keys: BlockKeys) -> None:
        """Begin a sequence that shares every written block of another; room past them is not shared. keys:
        the child's, a fork of its parent's"""
        parent = self._tables[parent_id]
        self.full.refuse_known(child_id)
        child = parent.fork(blocks_for(parent.physical_len, self.block_size), keys)
        for group in self.groups:
            group.fork(parent_id, child_id, child)
        self.offload.forked(parent_id, child_id)

    def adopt(self, seq_id: int, table: BlockTable) -> list[int]:
        """Begin an inexact sequence from elsewhere. Its table has one block id per block to allocate; they
        must be free. Returns: the new blocks, for the caller to fill."""
        self.full.refuse_known(seq_id)
        assert table.chain is None, "what is exact is found by its prefix"
        assert not self.windows, "nothing that comes from elsewhere has windows"
        blocks = self.pool.allocate(table.num_blocks)
        supply = iter(blocks)
        table.block_ids = [None if block is None else next(supply) for block in table.block_ids]
        self.full.add(seq_id, table)
        return blocks

    def free(self, seq_id: int) -> int:
        """Forget a sequence and drop its references, tail first: a chain's head is reused last. Returns:
        blocks that went back to the pool."""
        table = self._tables[seq_id]
        self.mark_active(seq_id)
        freed = sum([group.free(seq_id, table) for group in self.groups])
        self.offload.freed(seq_id)
        return freed

    def mark_idle(self, seq_id: int) -> None:
        """Count the blocks that only idle sequences hold as evictable. An idle sequence's table is fixed."""
        if seq_id not in self._idle:
            self._idle.add(seq_id)
            self.pool.mark_idle(self.blocks(seq_id))

    def mark_active(self, seq_id: int) -> None:
        """Undo mark_idle, if it was called; to be called before the sequence is parked."""
        if seq_id in self._idle:
            self._idle.remove(seq_id)
            self.pool.mark_active(self.blocks(seq_id))

    def grow(self, seq_id: int, num_tokens: int, num_drafts: int = 0) -> Growth:
        """Make room to write num_tokens slots after physical_len; a shared tail block is replaced.
        num_drafts: the number of drafts at the end of these tokens.

        Changes no length. Growing again before commit adds only what is missing. can_grow must hold. The
        source of a copy is not reused before `release_copy_sources`.
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
        """Release the sources of grow's copies, once the copies have been made."""
        if self._held:
            self.pool.release(self._held.elements())
            self._held.clear()
        self.offload.release_copy_sources()

    def trim(self, seq_id: int) -> int:
        """Free a sequence's blocks after its written slots. Returns: how many."""
        table = self._tables[seq_id]
        return self.pool.release(table.trim(blocks_for(table.physical_len, self.block_size)))

    def commit(self, seq_id: int, num_tokens: int, *, exact: bool = True) -> None:
        """Record the next num_tokens tokens as written. Full blocks become hits, unless these tokens, and so
        all later ones, differ from the result of full attention."""
        table = self._tables[seq_id]
        if not exact and table.exact:
            table.mark_inexact()
        for group in self.groups:
            group.commit(seq_id, table, num_tokens)
        self.offload.committed(seq_id, table)

    def shrink(self, plan: CompactionPlan[int]) -> Shrunk:
        """Apply a planned table and release the other blocks, tail first: all or nothing.

        Fresh blocks are taken before any is released, so no source is a target by accident. The caller moves
        the bytes before anything else is allocated. The logical length stays.
        """
        return self.full.shrink(plan, self._tables[plan.seq_id])

    def release_out_of_window(self, seq_id: int, num_tokens: int) -> int:
        """Free the full blocks of a sequence's first tokens, which no layer sees any more; they stay hits.
        The sequence must not be compressed later. Returns: blocks that went back to the pool."""
        return self.pool.release(self._tables[seq_id].release_out_of_window(num_tokens // self.block_size))

    def drop_blocks(self, seq_id: int, indices: Sequence[int]) -> int:
        """Free the full blocks at these table entries, last first; later entries move up, and the physical
        length falls. No byte moves. Returns: blocks that went back to the pool."""
        return self.full.drop(seq_id, self._tables[seq_id], indices)

    def invalidate(self, seq_id: int) -> None:
        """Unindex a sequence's blocks: their content may be wrong, and no prefix hit may find them."""
        for block in self.blocks(seq_id):
            self.pool.unindex(block)
        self.offload.invalidated(seq_id, self._tables[seq_id])

    def mark_inexact(self, seq_id: int) -> None:
        """Stop indexing the sequence, because it is no longer exact."""
        self._tables[seq_id].mark_inexact()

    def reset_prefix_cache(self, *, external: bool = True) -> None:
        """Forget every indexed prefix; running sequences keep their blocks and are not indexed again.
        external: also those below the pool"""
        self.pool.clear_index()
        self.offload.reset(external=external)

    def stats(self) -> MemoryStats:
        """Counts of blocks now, and since the start; expired pins are not counted."""
        states = NO_STATES if self.recurrent is None else self.recurrent.counts
        return memory_stats(self.pool, self.prefix, self.full.freed_by_compression, self._cow_copies, states)

    def check(self) -> None:
        """Verify the whole structure, O(pool). Raises AssertionError."""
        self.pool.check()
        held = Counter(block for seq_id in self._tables for block in self.blocks(seq_id))
        check_counts(self.pool, held + self._held)
        idle = Counter(block for seq_id in self._idle for block in self.blocks(seq_id))
        counted = {block: refs for block, refs in enumerate(self.pool.idle_refs) if refs}
        assert idle == counted, f"idle sequences hold {dict(idle)}, {counted} counted"
        for seq_id, table in self._tables.items():
            for group in self.groups:
                group.check(seq_id, table)
        if self.recurrent is not None:
            self.recurrent.check_slots()
        self.offload.check()
