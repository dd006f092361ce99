"""The memory as the scheduler sees it: the question first, then the change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.check import check_memory
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix_index import HashFunction, PrefixIndex, sha256
from kvreclaim.memory.prefix_match import PrefixMatch, chain_after, find_match
from kvreclaim.memory.shrink import ShrinkPlan, Shrunk, check_plan
from kvreclaim.memory.stats import MemoryStats


@dataclass(frozen=True, slots=True)
class Growth:
    """What grow changed.

    new_blocks: appended to the table
    copies:     (source, destination) blocks whose bytes the caller copies before it writes
    """

    new_blocks: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


NO_GROWTH = Growth((), ())


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
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        fingerprint: str = "",
        hash_function: HashFunction = sha256,
    ) -> None:
        if block_size < 1:
            raise InvalidArgumentError(f"block_size is {block_size}; at least 1 slot is needed; use 16")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, PrefixIndex(block_size, fingerprint, hash_function))
        self._tables: dict[int, BlockTable] = {}
        self._query_tokens = 0
        self._hit_tokens = 0
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

    def ref_counts(self, seq_id: int) -> tuple[int, ...]:
        """References per table entry; a hole has 0."""
        refs = self.pool.refs
        return tuple(0 if block is None else refs[block] for block in self.table(seq_id).block_ids)

    def indexed(self, seq_id: int) -> tuple[bool, ...]:
        """Per table entry, whether a prefix hit can find the block; a hole can't be found."""
        index = self.pool.index
        return tuple(block is not None and block in index for block in self.table(seq_id).block_ids)

    def writable(self, seq_id: int) -> tuple[bool, ...]:
        """Per table entry, whether the sequence may change the block's bytes; a hole has none."""
        pool = self.pool
        return tuple(b is not None and pool.is_writable(b) for b in self.table(seq_id).block_ids)

    def match_prefix(
        self, token_ids: Sequence[int], *, cache_salt: str | None = None, max_tokens: int | None = None
    ) -> PrefixMatch:
        """The longest run of indexed full blocks that begins this prompt.

        At least one token of the prompt stays to be computed, and max_tokens is not exceeded.
        A pure question: no order, count or statistic changes.
        """
        limit = len(token_ids) - 1 if max_tokens is None else min(len(token_ids) - 1, max_tokens)
        return find_match(self.pool.index, token_ids, limit, cache_salt)

    def can_admit(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether admit and then grow(num_tokens) would succeed: a queued hit is no longer free."""
        refs = self.pool.refs
        queued = sum(1 for block in match.block_ids if refs[block] == 0)
        needed = -(-(match.num_tokens + num_tokens) // self.block_size) - len(match.block_ids)
        return needed <= self.pool.num_free - queued

    def admit(
        self, seq_id: int, match: PrefixMatch, *, token_ids: Sequence[int], cache_salt: str | None = None
    ) -> None:
        """Begin a sequence with the blocks of a match of this very prompt and salt, made in this step."""
        self._refuse_known(seq_id)
        assert match.num_tokens == len(match.block_ids) * self.block_size <= max(0, len(token_ids) - 1), (
            f"{match.num_tokens} tokens in {len(match.block_ids)} blocks for {len(token_ids)} tokens"
        )
        chain = chain_after(self.pool.index, match, token_ids, cache_salt)
        for block in match.block_ids:
            self.pool.touch(block)
        table = BlockTable(chain if self.enable_prefix_caching else None, list(match.block_ids))
        table.advance(match.num_tokens)
        self._tables[seq_id] = table
        if self.enable_prefix_caching:
            self._query_tokens += len(token_ids)
            self._hit_tokens += match.num_tokens

    def fork(self, parent_id: int, child_id: int) -> None:
        """Begin a sequence that shares every written block of another; room past them is not shared."""
        parent = self.table(parent_id)
        self._refuse_known(child_id)
        child = parent.fork(-(-parent.physical_len // self.block_size))
        for block in child.blocks():
            self.pool.touch(block)
        self._tables[child_id] = child

    def free(self, seq_id: int) -> int:
        """Forget a sequence and drop its references, tail first: a chain's head is reused last.

        Returns: blocks that went back to the pool.
        """
        blocks = self.table(seq_id).blocks()
        del self._tables[seq_id]
        return self.pool.release(reversed(blocks))

    def can_grow(self, seq_id: int, num_tokens: int) -> bool:
        """Whether grow would succeed."""
        table = self.table(seq_id)
        needed = -(-(table.physical_len + num_tokens) // self.block_size) - len(table.block_ids)
        if needed < 0:
            needed = 0
        if num_tokens and self._tail_is_shared(table):
            needed += 1
        return needed <= len(self.pool.free_queue)

    def grow(self, seq_id: int, num_tokens: int) -> Growth:
        """Make room to write num_tokens slots after physical_len; a shared tail block is replaced.

        Changes no length. Growing again before commit adds only what is still missing. The caller
        has asked can_grow first.
        """
        table = self.table(seq_id)
        needed = -(-(table.physical_len + num_tokens) // self.block_size) - len(table.block_ids)
        shared = num_tokens > 0 and self._tail_is_shared(table)
        if needed <= 0 and not shared:
            return NO_GROWTH
        blocks = self.pool.allocate(max(needed, 0) + shared)
        copies = (self._unshare_tail(table, blocks.pop(0)),) if shared else ()
        table.append(blocks)
        return Growth(tuple(blocks), copies)

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """The K/V of these tokens have been written at the next slots; full blocks become hits."""
        table = self.table(seq_id)
        start, num_tokens = table.physical_len, len(token_ids)
        room = len(table.block_ids) * self.block_size - start
        assert num_tokens <= room, f"sequence {seq_id}: {num_tokens} tokens written, room for {room}"
        assert not num_tokens or not self._tail_is_shared(table), f"sequence {seq_id}: wrote a shared block"
        table.advance(num_tokens)
        if table.chain is not None:
            tail = table.tail
            tail.extend(token_ids)
            if len(tail) >= self.block_size:
                self._enter_full_blocks(table, start // self.block_size)

    def can_shrink(self, plan: ShrinkPlan) -> bool:
        """Whether the fresh blocks that the plan needs are free now."""
        return plan.targets.count(None) <= self.pool.num_free

    def shrink(self, plan: ShrinkPlan) -> Shrunk:
        """Give a sequence its planned table and release the other blocks, tail first: all or nothing.

        Fresh blocks are taken before any is released, so no source is a target by accident. The
        caller moves the bytes before anything else is allocated. The logical length stays.
        """
        table = self.table(plan.seq_id)
        check_plan(plan, table, self.pool, self.block_size)
        for block in plan.strip:
            self.pool.strip(block)
        fresh = self.pool.allocate(plan.targets.count(None))
        supply = iter(fresh)
        block_ids = tuple(next(supply) if target is None else target for target in plan.targets)
        kept = set(block_ids)
        dropped = [block for block in reversed(table.blocks()) if block not in kept]
        table.shrink(block_ids, plan.num_tokens)
        freed = self.pool.release(dropped) - len(fresh)
        self._freed_by_compression += freed
        return Shrunk(block_ids, tuple(fresh), freed)

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

    def mark_inexact(self, seq_id: int) -> None:
        """Something lossy happened: nothing written from here on is ever indexed."""
        self.table(seq_id).mark_inexact()

    def reset_prefix_cache(self) -> None:
        """Forget every indexed prefix; running sequences keep their blocks and are not indexed again."""
        self.pool.clear_index()

    def reset_peak(self) -> None:
        """Measure peak_in_use anew from here."""
        self.pool.reset_peak()

    def stats(self) -> MemoryStats:
        pool = self.pool
        return MemoryStats(
            num_blocks=pool.num_blocks,
            in_use=pool.num_in_use,
            cached=pool.num_cached,
            free=pool.num_free - pool.num_cached,
            peak_in_use=pool.peak_in_use,
            prefix_query_tokens=self._query_tokens,
            prefix_hit_tokens=self._hit_tokens,
            prefix_evictions=pool.num_evictions,
            blocks_freed_by_compression=self._freed_by_compression,
            cow_copies=self._cow_copies,
        )

    def check(self) -> None:
        """Verify the whole structure, O(pool). Raises AssertionError."""
        check_memory(self.pool, self._tables, self.block_size)

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

    def _tail_is_shared(self, table: BlockTable) -> bool:
        """Whether the next slot lies in a begun block that others hold too."""
        index, used = divmod(table.physical_len, self.block_size)
        if not used:
            return False
        block = table.block_ids[index]
        assert block is not None, f"entry {index} is written next and is a hole"
        return self.pool.refs[block] > 1

    def _unshare_tail(self, table: BlockTable, copy: int) -> tuple[int, int]:
        """Let a fresh block stand for the shared one. Returns: (source, destination) of the bytes."""
        index = table.physical_len // self.block_size
        source = table.block_ids[index]
        assert source is not None, f"entry {index} is written next and is a hole"
        table.replace(index, copy)
        self.pool.release((source,))
        self._cow_copies += 1
        return source, copy

    def _enter_full_blocks(self, table: BlockTable, first: int) -> None:
        """Index the table's entries from first on, as far as the tail's tokens fill them."""
        size, tail, done = self.block_size, table.tail, 0
        while len(tail) - done >= size and table.chain is not None:
            block = table.block_ids[first]
            assert block is not None, f"entry {first} was written and is a hole"
            table.chain = self.pool.enter(block, table.chain, tail[done : done + size])
            first, done = first + 1, done + size
        table.tail = [] if table.chain is None else tail[done:]
