"""The memory as the scheduler sees it: its parts, and the questions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

from kvreclaim.checks import check_number
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import INDEXED, blocks_for
from kvreclaim.memory.changes import TableState
from kvreclaim.memory.check import check_counts
from kvreclaim.memory.eviction import DEFAULT_ORDER, EvictionOrder, make_order
from kvreclaim.memory.groups.full import FullAttentionGroup
from kvreclaim.memory.groups.group import GroupManager
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.groups.state_slots import NO_STATES, StateSlots
from kvreclaim.memory.groups.window import WindowGroup
from kvreclaim.memory.offload import NoOffload, OffloadSlots
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import NUM_REMEMBERED, Entry, PrefixIndex
from kvreclaim.memory.prefix.keys import BlockHash, BlockKeys, HashFunction, sha256
from kvreclaim.memory.prefix_cache import PrefixCache, PrefixMatch
from kvreclaim.memory.stats import MemoryStats, memory_stats
from kvreclaim.memory.windows.window import Window


class MemoryQuestions:
    """All that can be asked about which sequence holds which blocks. Changes nothing.

    Args:
        num_blocks:            blocks in the pool, >= 1
        block_size:            slots per block, >= 1
        enable_prefix_caching: off: nothing is hashed, every match is empty
        fingerprint:           what the K/V depend on besides the tokens (model, dtype, KV format)
        hash_function:         of the prefix chain; tests inject one that collides
        eviction_policy:       in which order cached blocks are reused: a name, or an order of its own
        max_pinned_fraction:   most of the pool that may be pinned at a time, 0 to 1
        residency_sample:      share of the cached blocks that drain_residency tells of, 0 to 1
        clock:                 seconds, never backwards; of pins and residency
        windows:               of layers that see the last tokens only; each has a group of its own (groups/)
                               A sequence's table is that of the layers with full attention
        window_group:          the class of these groups
        states:                slots of recurrent layers; None: the model has none
        offload:               makes what lies below the pool: `partial(TieredOffload, num_host_slots=...)`
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
        residency_sample: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        windows: Sequence[Window] = (),
        window_group: type[WindowGroup] = WindowGroup,
        states: StateSlots | None = None,
        offload: Callable[[FullAttentionGroup, RecurrentGroup | None], OffloadSlots] = NoOffload,
    ) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size is {block_size}; at least 1 slot is needed; use 16")
        check_number("max_pinned_fraction", max_pinned_fraction, 0, 1)
        check_number("residency_sample", residency_sample, 0, 1)
        if isinstance(eviction_policy, str):
            eviction_policy = make_order(eviction_policy, max(num_blocks, 0))
        remembered = max(1, min(num_blocks, NUM_REMEMBERED))
        self.block_size = block_size
        self.pool = BlockPool(
            num_blocks,
            PrefixIndex(remembered),
            order=eviction_policy,
            max_pinned=int(max_pinned_fraction * num_blocks),
            residency_sample=residency_sample,
            clock=clock,
        )
        self.prefix = PrefixCache(self.pool, block_size, enabled=enable_prefix_caching)
        self._held: Counter[int] = Counter()
        self.full = FullAttentionGroup(self.pool, block_size, self._held, self.prefix)
        self.windows = tuple(
            window_group(self.pool, block_size, self._held, window, n) for n, window in enumerate(windows)
        )
        self.recurrent: RecurrentGroup | None = None
        if states is not None:
            self.recurrent = RecurrentGroup(self.pool, block_size, self._held, states)
        recurrent = () if self.recurrent is None else (self.recurrent,)
        self.groups: tuple[GroupManager, ...] = (self.full, *self.windows, *recurrent)
        self.offload = offload(self.full, self.recurrent)
        assert not (windows and self.offload.num_slots), "windows have no slots; all layers share one table"
        self._idle: set[int] = set()
        self._hashing = BlockHash(block_size, fingerprint, hash_function)
        self._tables = self.full.tables
        self._cow_copies = 0

    def table(self, seq_id: int) -> BlockTable:
        """Its live table: read it, don't change it."""
        return self._tables[seq_id]

    @property
    def num_free(self) -> int:
        """Blocks held by nobody."""
        return self.pool.num_free

    @property
    def num_in_use(self) -> int:
        """Blocks that sequences hold which are not idle."""
        return self.pool.num_in_use

    @property
    def num_idle(self) -> int:
        """Blocks that only idle sequences hold."""
        return self.pool.num_idle

    @property
    def max_idle(self) -> int | None:
        """Sequences that may be idle at a time: with recurrent layers each holds a state that a checkpoint
        could have. None: any number."""
        return None if self.recurrent is None else self.recurrent.sizes.num_checkpoints

    @property
    def num_pool_blocks(self) -> int:
        """Blocks, whoever holds them."""
        return self.pool.num_blocks

    def ref_count(self, block: int) -> int:
        """References to a block."""
        return self.pool.refs[block]

    def table_state(self, seq_id: int) -> TableState:
        """Its table as a compaction is planned from it."""
        ids, refs, marks = self._tables[seq_id].block_ids, self.pool.refs, self.pool.marks
        return TableState(
            ids,
            tuple(0 if block is None else refs[block] for block in ids),
            tuple(block is not None and marks[block] & INDEXED > 0 for block in ids),
        )

    def indexed_len(self, seq_id: int) -> int:
        """Leading tokens of the sequence that were served from the prefix index or entered into it, even
        if they have been evicted, compressed or forgotten since."""
        return len(self._tables[seq_id].entries) * self.block_size

    def publishes(self, seq_id: int) -> bool:
        """Whether the next full block of the sequence enters the prefix index."""
        return self._tables[seq_id].chain is not None

    @property
    def index_version(self) -> int:
        """Grows whenever a match may have changed."""
        states = 0 if self.recurrent is None else self.recurrent.version
        return self.pool.index.version + self.offload.index_version + states

    def follows_itself(self, seq_id: int) -> bool:
        """Whether the next full block of the sequence, if it is entered, follows one that the sequence holds:
        then it makes no difference what becomes of other blocks before, provided that nobody else draws the
        same tokens."""
        table = self._tables[seq_id]
        if not isinstance(table.chain, Entry):
            return True
        return table.chain.block == table.block_ids[len(table.entries) - 1]

    def blocks(self, seq_id: int) -> list[int]:
        """All blocks that a sequence holds."""
        table = self._tables[seq_id]
        return [block for group in self.groups for block in group.blocks(seq_id, table)]

    def num_blocks(self, seq_id: int) -> int:
        """Number of these blocks."""
        table, count = self._tables[seq_id], 0
        for group in self.groups:
            count += group.num_blocks(seq_id, table)
        return count

    def keys(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, lasting: bool = True
    ) -> BlockKeys:
        """For a sequence that is to begin: what its blocks are found by. To be made once and kept as long
        as the sequence lives; token_ids is its own list, which only grows at its end."""
        return BlockKeys(self._hashing, token_ids, cache_salt, lasting=lasting)

    def match_prefix(self, keys: BlockKeys, *, max_tokens: int | None = None) -> PrefixMatch:
        """The longest run of indexed full blocks that begins these keys' prompt, all its tokens.

        At least one token of the prompt stays to be computed, and max_tokens is not exceeded.
        A pure question: no order, count or statistic changes.
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
        """Whether admit and then grow(num_tokens) would succeed."""
        return blocks_for(num_tokens, self.block_size) <= self.num_spare(match)

    def num_spare(self, match: PrefixMatch) -> int:
        """Blocks that could be taken beside those of a match: a queued hit is no longer free."""
        refs = self.pool.refs
        queued = sum(not refs[block] for block in match.window_blocks)
        return self.pool.num_free - (len(match.entries) - self.num_shared(match)) - queued

    def num_shared(self, match: PrefixMatch) -> int:
        """Blocks of a match that other sequences hold now."""
        return sum(1 for entry in match.entries if self.pool.refs[entry.block])

    def num_shared_of(self, seq_id: int) -> int:
        """Blocks of a sequence's table that other sequences hold, too."""
        refs = self.pool.refs
        return sum(block is not None and refs[block] > 1 for block in self._tables[seq_id].block_ids)

    def num_to_fork(self, parent: BlockTable, num_tokens: int) -> int:
        """Blocks that a fork of this table takes to grow by so many tokens, with a copy of the last one."""
        return blocks_for(parent.physical_len + num_tokens, self.block_size) - (
            parent.physical_len // self.block_size
        )

    def first_lacking(self, passes: Iterable[tuple[int, int]], unsure: Container[int] = ()) -> int | None:
        """Which of these passes would lack blocks; None: none.

        passes: (sequence, tokens that it keeps), carried out in this order once the copies of this step have
                been made. One may take what those before it have given back.
        unsure: sequences whose pass may not come: what it would give back is not counted on
        """
        return self.full.first_lacking(passes, unsure)

    def has_room(self, seq_id: int, num_tokens: int) -> bool:
        """Whether its blocks take num_tokens more, so that grow would change nothing. May be False where that
        has nothing to do."""
        table = self._tables[seq_id]
        return all(group.has_room(seq_id, table, num_tokens) for group in self.groups)

    def can_grow(self, seq_id: int, num_tokens: int) -> bool:
        """Whether grow would succeed."""
        table, missing = self._tables[seq_id], 0
        for group in self.groups:
            missing += group.missing(seq_id, table, num_tokens)
        return missing <= self.pool.num_free

    def stops(self, seq_id: int) -> tuple[int, ...]:
        """Lengths at which a sequence's steps must end, so that its recurrent state there can be kept."""
        return () if self.recurrent is None else self.recurrent.stops(seq_id)

    def stats(self) -> MemoryStats:
        """Counts of blocks now, and since the start; a pin whose time is over is not counted."""
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
