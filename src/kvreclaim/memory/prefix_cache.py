"""What the memory does with prompts: what is hit, what is entered, what is pinned, and why not."""

from __future__ import annotations

from collections.abc import Sequence

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.misses import INELIGIBLE, MISS_REASONS, SUB_BLOCK
from kvreclaim.memory.pins import Retention, ttls
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix_match import PrefixMatch, find_match, matched_entries


class PrefixCache:
    """The pool's index as sequences use it, with counts. enabled: off: nothing is hashed or found."""

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        self.enabled = enabled
        self.query_tokens = 0
        self.hit_tokens = 0
        self.misses = dict.fromkeys(MISS_REASONS, 0)
        self._pool = pool
        self._size = pool.index.block_size

    def match(self, token_ids: Sequence[int], salt: str | None, max_tokens: int | None) -> PrefixMatch:
        """The longest run of indexed full blocks that begins this prompt, less than all of it."""
        if not self.enabled:
            return PrefixMatch((), 0, INELIGIBLE)
        limit = len(token_ids) - 1 if max_tokens is None else min(len(token_ids) - 1, max_tokens)
        return find_match(self._pool.index, token_ids, limit, salt)

    def begin(
        self, match: PrefixMatch, token_ids: Sequence[int], salt: str | None, priority: int
    ) -> BlockTable:
        """The table of a sequence that begins with the blocks of a match, which it now references."""
        index = self._pool.index
        entries = matched_entries(index, match, token_ids, salt)
        chain = (entries[-1] if entries else index.root(salt)) if self.enabled else None
        self._pool.hit(match.block_ids, priority)
        self._count(match, len(token_ids))
        table = BlockTable(chain, list(match.block_ids), entries=entries, priority=priority)
        table.advance(match.num_tokens)
        return table

    def _count(self, match: PrefixMatch, num_tokens: int) -> None:
        """Every token of the prompt is a hit or a miss of one reason."""
        in_full_blocks = max(0, num_tokens - 1) // self._size * self._size
        self.query_tokens += num_tokens
        self.hit_tokens += match.num_tokens
        self.misses[match.miss] += in_full_blocks - match.num_tokens
        self.misses[SUB_BLOCK] += num_tokens - in_full_blocks

    def enter_full_blocks(self, table: BlockTable, first: int) -> None:
        """Index the table's entries from first on, as far as the tail's tokens fill them."""
        size, tail, done = self._size, table.tail, 0
        while len(tail) - done >= size and table.chain is not None:
            block = table.block_ids[first]
            assert block is not None, f"entry {first} was written and is a hole"
            tokens = tail[done : done + size]
            table.chain = entry = self._pool.enter(block, table.chain, tokens, table.priority)
            if entry is not None:
                table.entries.append(entry)
                table.repeated_len += size * (entry.block != block)
            first, done = first + 1, done + size
        table.tail = [] if table.chain is None else tail[done:]

    def pin(self, table: BlockTable, retention: Sequence[Retention]) -> None:
        """Pin the blocks under which this sequence's beginning can be hit, as far as they still can be."""
        now = self._pool.pins.expire()
        for entry, ttl_s in zip(table.entries, ttls(retention, self._size), strict=False):
            if not self._pool.index.is_live(entry):
                return
            self._pool.pins.pin(entry.block, ttl_s, now)
