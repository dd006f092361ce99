"""The prefix cache of the memory manager: hits, entries, pins, and reasons of misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.pins import Retention, ttls
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import INELIGIBLE, MISS_REASONS, SUB_BLOCK, BlockKeys, Entry, Link
from kvreclaim.memory.windows import Row


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Full blocks that hold a prompt's beginning. Valid until blocks are next allocated.

    keys:    keys of the prompt
    entries: entries of these blocks, in order
    miss:    reason why the next full block is missing, counted for all later ones too; meaningless if there
             is none
    lower:   entries of the host's slots that hold the following blocks, in order
    windows: per window, the rows that a sequence beginning with these entries sees
    num_indexed: leading indexed full blocks, including those after the entries that a sequence can begin with
    state:   the last one's entry on the host, if its state of the recurrent layers comes from there
    """

    keys: BlockKeys
    entries: tuple[Entry, ...]
    miss: str
    lower: tuple[Entry, ...] = ()
    windows: tuple[tuple[Row, ...], ...] = field(default=(), kw_only=True)
    num_indexed: int = field(default=0, kw_only=True)
    state: Entry | None = field(default=None, kw_only=True)

    @property
    def window_blocks(self) -> list[int]:
        """Return the blocks of these rows."""
        return [block for rows in self.windows for row in rows for block in row]

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(entry.block for entry in self.entries)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that need not be computed."""
        return (len(self.entries) + len(self.lower)) * self.keys.block_size


class PrefixCache:
    """Lookups in the pool's index, with counts. enabled: False hashes and finds nothing."""

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool) -> None:
        self.enabled = enabled
        self.query_tokens = 0
        self.hit_tokens = 0
        self.misses = dict.fromkeys(MISS_REASONS, 0)
        self._pool = pool
        self._size = block_size

    def match(self, keys: BlockKeys, max_tokens: int | None) -> PrefixMatch:
        """Return the longest indexed run of full blocks at this prompt's beginning, less than all of it.

        Reads one key more than it finds. Changes nothing.
        """
        if not self.enabled:
            return PrefixMatch(keys, (), INELIGIBLE)
        limit = keys.num_tokens - 1 if max_tokens is None else min(keys.num_tokens - 1, max_tokens)
        index = self._pool.index
        link: Link = index.root(keys.salt)
        entries: list[Entry] = []
        miss = INELIGIBLE
        for i in range(limit // self._size):
            key = keys[i]
            entry = index.find(link, key)
            if entry is None:
                miss = index.why_missing(link, key)
                break
            entries.append(entry)
            link = entry
        return PrefixMatch(keys, tuple(entries), miss)

    def refresh(self, match: PrefixMatch) -> None:
        """Renew a match as if a sequence had just begun with it and ended: its blocks are reused later."""
        self._pool.hit(match.block_ids, 0)
        self._pool.release(reversed(match.block_ids))

    def begin(self, match: PrefixMatch, priority: int) -> BlockTable:
        """Make the table of a sequence that begins with a match's blocks in the pool, and reference them."""
        keys, index, entries = match.keys, self._pool.index, match.entries
        for i, entry in enumerate(entries):
            assert index.is_live(entry), f"block {entry.block}, number {i} of the match, was reused"
        chain = (entries[-1] if entries else index.root(keys.salt)) if self.enabled else None
        block_ids = match.block_ids
        self._pool.hit(block_ids, priority)
        self._count(match)
        table = BlockTable(keys, chain, list(block_ids), entries=list(entries), priority=priority)
        table.advance(len(entries) * self._size)
        return table

    def _count(self, match: PrefixMatch) -> None:
        """Count every token of the prompt as a hit, or as a miss of one reason."""
        num_tokens = match.keys.num_tokens
        in_full_blocks = max(0, num_tokens - 1) // self._size * self._size
        self.query_tokens += num_tokens
        self.hit_tokens += match.num_tokens
        self.misses[match.miss] += in_full_blocks - match.num_tokens
        self.misses[SUB_BLOCK] += num_tokens - in_full_blocks

    def enter_full_blocks(self, table: BlockTable, first: int) -> None:
        """Index the table's entries from first on, as far as they are full."""
        for index in range(first, table.physical_len // self._size):
            if table.chain is None:
                return
            block = table.block_ids[index]
            assert block is not None, f"entry {index} was written and is a hole"
            table.chain = entry = self._pool.enter(block, table.chain, table.keys[index], table.priority)
            if entry is not None:
                table.entries.append(entry)
                table.repeated_len += self._size * (entry.block != block)

    def pin(self, table: BlockTable, retention: Sequence[Retention], owner: str | None) -> None:
        """Pin the blocks under which this sequence's beginning can be hit, as far as they still can be."""
        now = self._pool.pins.expire()
        for entry, ttl_s in zip(table.entries, ttls(retention, self._size), strict=False):
            if not self._pool.index.is_live(entry):
                return
            self._pool.pins.pin(entry.block, ttl_s, now, owner)
