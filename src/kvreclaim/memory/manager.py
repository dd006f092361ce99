"""The memory as the scheduler sees it: the question first, then the change."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvreclaim.checks import check_number
from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import NO_GROWTH, CompactionPlan, Growth, Shrunk, TableState
from kvreclaim.memory.check import check_memory, check_plan
from kvreclaim.memory.eviction import DEFAULT_ORDER, EvictionOrder, make_order
from kvreclaim.memory.marks import INDEXED
from kvreclaim.memory.pins import Retention
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import NUM_REMEMBERED, WINDOW, Entry, PrefixIndex
from kvreclaim.memory.prefix.keys import BlockHash, BlockKeys, HashFunction, sha256
from kvreclaim.memory.prefix_cache import PrefixCache, PrefixMatch
from kvreclaim.memory.residency import BlockResidency
from kvreclaim.memory.stats import MemoryStats, memory_stats
from kvreclaim.memory.window_tables import Windows
from kvreclaim.memory.windows.window import Window


class MemoryManager:
    """Which sequence holds which blocks. Integers only: the caller moves every byte.

    A can_* method answers without changing anything; what follows a yes in the same step succeeds.
    A sequence id that is not known raises UnknownRequestError. Not thread-safe.

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
        windows:               of layers that see the last tokens only. They have tables of their own, over
                               blocks of the same pool, and hold what their windows need; what is said of a
                               sequence's table otherwise is of the layers with full attention
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
    ) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size is {block_size}; at least 1 slot is needed; use 16")
        check_number("max_pinned_fraction", max_pinned_fraction, 0, 1)
        check_number("residency_sample", residency_sample, 0, 1)
        if isinstance(eviction_policy, str):
            eviction_policy = make_order(eviction_policy, max(num_blocks, 0), block_size)
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
        self.windows = Windows(self.pool, block_size, windows)
        self._hashing = BlockHash(block_size, fingerprint, hash_function)
        self._clock = clock
        self._tables: dict[int, BlockTable] = {}
        self._held: Counter[int] = Counter()
        self._freed_by_compression = 0
        self._cow_copies = 0

    def table(self, seq_id: int) -> BlockTable:
        """Its live table: read it, don't change it."""
        try:
            return self._tables[seq_id]
        except KeyError:
            raise UnknownRequestError(
                f"sequence {seq_id} holds no blocks; {len(self._tables)} sequences do; admit it first"
            ) from None

    @property
    def num_free(self) -> int:
        """Blocks held by nobody."""
        return self.pool.num_free

    def table_state(self, seq_id: int) -> TableState:
        """Its table as a compaction is planned from it."""
        ids, refs, marks = self.table(seq_id).block_ids, self.pool.refs, self.pool.marks
        return TableState(
            ids,
            tuple(0 if block is None else refs[block] for block in ids),
            tuple(block is not None and marks[block] & INDEXED > 0 for block in ids),
        )

    def indexed_len(self, seq_id: int) -> int:
        """Leading tokens of the sequence that were served from the prefix index or entered into it, even
        if they have been evicted, compressed or forgotten since."""
        return len(self.table(seq_id).entries) * self.block_size

    def publishes(self, seq_id: int) -> bool:
        """Whether the next full block of the sequence enters the prefix index."""
        return self.table(seq_id).chain is not None

    @property
    def index_version(self) -> int:
        """Grows whenever a match may have changed."""
        return self.pool.index.version

    def follows_itself(self, seq_id: int) -> bool:
        """Whether the next full block of the sequence, if it is entered, follows one that the sequence holds:
        then it makes no difference what becomes of other blocks before, provided that nobody else draws the
        same tokens."""
        table = self.table(seq_id)
        if not isinstance(table.chain, Entry):
            return True
        return table.chain.block == table.block_ids[len(table.entries) - 1]

    def open_blocks(self) -> list[int]:
        """The blocks that the next tokens of all sequences go to, one that holds some already included."""
        tables = ((table.block_ids, table.physical_len) for table in self._tables.values())
        found = [block for ids, n in tables for block in ids[n // self.block_size :] if block is not None]
        for seq_id, table in self._tables.items() if self.windows.windows else ():
            found += self.windows.open_blocks(seq_id, table.logical_len)
        return found

    def blocks(self, seq_id: int) -> list[int]:
        """All that a sequence holds."""
        return self.table(seq_id).blocks() + self.windows.blocks(seq_id)

    def num_blocks(self, seq_id: int) -> int:
        """How many these are."""
        return self.table(seq_id).num_blocks + self.windows.num_blocks(seq_id)

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
        return match if not self.windows.windows else self._behind_windows(match)

    def _behind_windows(self, match: PrefixMatch) -> PrefixMatch:
        """Cut a match to what every window can go on behind."""
        length = self.windows.fit(match.entries)
        entries, miss = match.entries[:length], match.miss if length == len(match.entries) else WINDOW
        return PrefixMatch(match.keys, entries, miss, windows=self.windows.hits(entries))

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
        return sum(block is not None and refs[block] > 1 for block in self.table(seq_id).block_ids)

    def num_to_fork(self, parent: BlockTable, num_tokens: int) -> int:
        """Blocks that a fork of this table takes to grow by so many tokens, with a copy of the last one."""
        return blocks_for(parent.physical_len + num_tokens, self.block_size) - (
            parent.physical_len // self.block_size
        )

    def first_lacking(self, passes: Iterable[tuple[int, int]]) -> int | None:
        """Which of these passes would lack blocks; None: none.

        passes: (sequence, tokens that it keeps), carried out in this order once the copies of this step have
                been made. One may take what those before it have given back.
        """
        refs, held = self.pool.refs, self._held
        free = self.pool.num_free + sum(refs[block] == count for block, count in held.items())
        left: dict[int, int] = {}
        for seq_id, keep in passes:
            blocks = self.table(seq_id).blocks()
            shared = [block for block in blocks if left.get(block, refs[block] - held[block]) > 1]
            own, needed = len(blocks) - len(shared), blocks_for(keep, self.block_size)
            if needed - own > free:
                return seq_id
            free += own - needed
            left.update((block, left.get(block, refs[block] - held[block]) - 1) for block in shared)
        return None

    def admit(self, seq_id: int, match: PrefixMatch, *, priority: int = 0) -> None:
        """Begin a sequence with the blocks of a match that was made in this step.

        A pin of one of these blocks begins anew. priority: of the request, a lower number is more
        important; the eviction order may look at it.
        """
        self._refuse_known(seq_id)
        self._tables[seq_id] = self.prefix.begin(match, priority)
        if self.windows.windows:
            self.windows.begin(seq_id, match.entries, match.windows, match.keys.num_tokens, priority)

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
        self.prefix.pin(self.table(seq_id), retention, owner)

    def fork(self, parent_id: int, child_id: int, keys: BlockKeys) -> None:
        """Begin a sequence that shares every written block of another; room past them is not shared.

        keys: of the child, a fork of its parent's
        """
        parent = self.table(parent_id)
        self._refuse_known(child_id)
        child = parent.fork(blocks_for(parent.physical_len, self.block_size), keys)
        for block in child.blocks():
            self.pool.touch(block)
        self._tables[child_id] = child
        if self.windows.windows:
            self.windows.fork(parent_id, child_id, parent.logical_len)

    def adopt(self, seq_id: int, table: BlockTable) -> list[int]:
        """Begin an inexact sequence that comes from elsewhere, and whose block ids stand for any blocks; as
        many are free. Returns: its blocks, for the caller to fill."""
        self._refuse_known(seq_id)
        assert table.chain is None, "what is exact is found by its prefix"
        assert not self.windows.windows, "nothing that comes from elsewhere has windows"
        blocks = self.pool.allocate(table.num_blocks)
        supply = iter(blocks)
        table.block_ids = [None if block is None else next(supply) for block in table.block_ids]
        self._tables[seq_id] = table
        return blocks

    def free(self, seq_id: int) -> int:
        """Forget a sequence and drop its references, tail first: a chain's head is reused last.

        Returns: blocks that went back to the pool.
        """
        table = self.table(seq_id)
        del self._tables[seq_id]
        return self.pool.release(reversed(table.blocks())) + self.windows.free(seq_id, table)

    def can_grow(self, seq_id: int, num_tokens: int) -> bool:
        """Whether grow would succeed."""
        table = self.table(seq_id)
        shared = num_tokens > 0 and self._shared_tail(table) is not None
        needed = self._missing(table, num_tokens) + shared
        if self.windows.windows and num_tokens:
            needed += self.windows.missing(seq_id, table.logical_len, num_tokens, self._held)
        return needed <= self.pool.num_free

    def grow(self, seq_id: int, num_tokens: int) -> Growth:
        """Make room to write num_tokens slots after physical_len; a shared tail block is replaced.

        Changes no length. Growing again before commit adds only what is still missing. The caller
        has asked can_grow first. The source of a copy is not handed out before `release_copy_sources`.
        """
        table = self.table(seq_id)
        missing = self._missing(table, num_tokens)
        source = self._shared_tail(table) if num_tokens else None
        if self.windows.windows and num_tokens:
            main = self._grow_table(table, missing, source)
            blocks, pairs = self.windows.grow(seq_id, table.logical_len, num_tokens, self._held)
            self._cow_copies += len(pairs)
            return Growth((*main.new_blocks, *blocks), (*main.copies, *pairs))
        return self._grow_table(table, missing, source)

    def _grow_table(self, table: BlockTable, missing: int, source: int | None) -> Growth:
        if not missing and source is None:
            return NO_GROWTH
        blocks = self.pool.allocate(missing + (source is not None))
        copies: tuple[tuple[int, int], ...] = ()
        if source is not None:
            copies = ((source, blocks.pop(0)),)
            table.replace(table.physical_len // self.block_size, copies[0][1])
            self._held[source] += 1
            self._cow_copies += 1
        table.append(blocks)
        return Growth(tuple(blocks), copies)

    def release_copy_sources(self) -> None:
        """The copies that grow asked for have been made: their sources are no longer held for them."""
        self.pool.release(self._held.elements())
        self._held.clear()

    def trim(self, seq_id: int) -> int:
        """Give back the room that a sequence has behind what it has written, whole blocks of it. Returns:
        blocks that went back."""
        table = self.table(seq_id)
        return self.pool.release(table.trim(blocks_for(table.physical_len, self.block_size)))

    def commit(self, seq_id: int, num_tokens: int, *, exact: bool = True) -> None:
        """The K/V of the next num_tokens tokens have been written; full blocks become hits, unless these
        tokens, and so all later ones, are not what full attention would give."""
        table = self.table(seq_id)
        start, num_entered = table.physical_len, len(table.entries)
        room = len(table.block_ids) * self.block_size - start
        assert num_tokens <= room, f"sequence {seq_id}: {num_tokens} tokens written, room for {room}"
        assert not num_tokens or self._shared_tail(table) is None, f"sequence {seq_id}: wrote a shared block"
        if not exact and table.exact:
            table.mark_inexact()
        table.advance(num_tokens)
        if table.chain is not None:
            self.prefix.enter_full_blocks(table, start // self.block_size)
        if self.windows.windows:
            self.windows.advance(seq_id, table, num_entered)

    def shrink(self, plan: CompactionPlan[int]) -> Shrunk:
        """Give a sequence its planned table and release the other blocks, tail first: all or nothing.

        Fresh blocks are taken before any is released, so no source is a target by accident. The
        caller moves the bytes before anything else is allocated. The logical length stays.
        """
        table = self.table(plan.seq_id)
        check_plan(plan, table, self.pool, self.block_size)
        for block in plan.strip:
            self.pool.unindex(block)
        fresh = self.pool.allocate(plan.targets.count(None))
        supply = iter(fresh)
        block_ids = tuple(next(supply) if target is None else target for target in plan.targets)
        kept = set(block_ids)
        dropped = [block for block in reversed(table.blocks()) if block not in kept]
        table.shrink(block_ids, plan.num_tokens)
        freed = self.pool.release(dropped) - len(fresh)
        self._freed_by_compression += freed
        return Shrunk(block_ids, freed)

    def release_out_of_window(self, seq_id: int, num_tokens: int) -> int:
        """Give back the full blocks of a sequence's first tokens, which no layer sees any more; they can be
        hit like any others. Nothing of it may be compressed later. Returns: blocks that went back."""
        return self.pool.release(self.table(seq_id).release_out_of_window(num_tokens // self.block_size))

    def punch(self, seq_id: int, indices: Sequence[int]) -> int:
        """Give back the full blocks at these table entries, last first, and leave holes; the lengths stay.

        Returns: blocks that went back to the pool.
        """
        table = self._table_with_full(seq_id, indices)
        freed = self.pool.release(table.punch(sorted(indices, reverse=True)))
        self._freed_by_compression += freed
        return freed

    def drop_blocks(self, seq_id: int, indices: Sequence[int]) -> int:
        """Like punch, but without holes: later entries move up, and the physical length falls. No byte
        moves: of a shared block only the reference goes.
        """
        table = self._table_with_full(seq_id, indices)
        freed = self.pool.release(reversed(table.drop(sorted(indices), self.block_size)))
        self._freed_by_compression += freed
        return freed

    def invalidate(self, seq_id: int) -> None:
        """What the sequence's blocks hold may be wrong: no prefix hit finds any of them from now on."""
        for block in self.table(seq_id).blocks():
            self.pool.unindex(block)
        self.windows.invalidate(seq_id)

    def mark_inexact(self, seq_id: int) -> None:
        """Something lossy happened: nothing written from here on is ever indexed."""
        self.table(seq_id).mark_inexact()

    def reset_prefix_cache(self) -> None:
        """Forget every indexed prefix; running sequences keep their blocks and are not indexed again."""
        self.pool.clear_index()

    def stats(self) -> MemoryStats:
        """What is where now, and counts since the start; a pin whose time is over is not counted."""
        return memory_stats(self.pool, self.prefix, self._freed_by_compression, self._cow_copies)

    def drain_residency(self) -> list[BlockResidency]:
        """The last 8,192 sampled cached blocks that were reused since the last call."""
        return self.pool.residency.drain()

    def check(self) -> None:
        """Verify the whole structure, O(pool). Raises AssertionError."""
        held = self._held + Counter(self.windows.every_block())
        check_memory(self.pool, self._tables, held, self.block_size)
        self.windows.check(self._tables)

    def _missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks to append before num_tokens more are written."""
        return max(0, blocks_for(table.physical_len + num_tokens, self.block_size) - len(table.block_ids))

    def _shared_tail(self, table: BlockTable) -> int | None:
        """The begun block that the next slot lies in, if other sequences hold it, too."""
        tail = table.begun(self.block_size)
        return tail if tail is not None and self.pool.refs[tail] - self._held[tail] > 1 else None

    def _refuse_known(self, seq_id: int) -> None:
        if seq_id in self._tables:
            raise InvalidArgumentError(
                f"sequence {seq_id} exists already; an id names one live sequence; free it or use another"
            )

    def _table_with_full(self, seq_id: int, indices: Sequence[int]) -> BlockTable:
        """The table; its entries at these indices must be full blocks."""
        table = self.table(seq_id)
        full = table.physical_len // self.block_size
        wrong = [index for index in indices if not 0 <= index < full]
        assert not wrong, f"sequence {seq_id}: entry {wrong[0]} is not one of {full} full blocks"
        return table
