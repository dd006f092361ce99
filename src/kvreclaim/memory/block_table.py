"""Block table of one sequence, and its lengths. Only this file changes the lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvreclaim.memory.prefix.index import BlockKeys, Entry, Link


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence. Others read it; only the memory manager calls what changes it.

    block_ids:    slot i lies in block_ids[i // block_size]; None is a hole: its block fell out of
                  the window and was given back. May exceed what physical_len needs (room)
    logical_len:  tokens processed: positions, stop rules, usage
    physical_len: slots written: attention length, next slot
    exact:        True until something lossy happens; then False for ever, and never indexed again
    exact_len:    leading slots with the KV of full attention; ends with exact
    version:      changes whenever block_ids change
    keys:         keys of its full blocks
    chain:        parent of its next full block in the prefix index; None: its blocks enter no more
    entries:      prefix-index entries that the leading full blocks were served from or entered as, also
                  after eviction; an entry may be an equal block of another sequence
    repeated_len: tokens that were computed although the index had them when they were entered
    priority:     priority of the request; a lower number is more important
    """

    keys: BlockKeys
    chain: Link | None
    block_ids: list[int | None] = field(default_factory=list)
    logical_len: int = 0
    physical_len: int = 0
    exact: bool = True
    version: int = 0
    entries: list[Entry] = field(default_factory=list)
    repeated_len: int = 0
    priority: int = 0
    _exact_len: int = 0
    _num_holes: int = 0
    _first: int = 0

    @classmethod
    def of_inexact(
        cls,
        keys: BlockKeys,
        block_ids: Sequence[int | None],
        *,
        logical_len: int,
        physical_len: int,
        exact_len: int,
    ) -> BlockTable:
        """Make the table of a sequence that became inexact elsewhere."""
        table = cls(keys, None, list(block_ids), logical_len, physical_len, exact=False)
        table._exact_len, table._num_holes = exact_len, table.block_ids.count(None)
        return table

    @property
    def num_blocks(self) -> int:
        """Number of blocks held, without the holes."""
        return len(self.block_ids) - self._num_holes

    @property
    def num_evicted(self) -> int:
        return self.logical_len - self.physical_len

    @property
    def exact_len(self) -> int:
        return self.physical_len if self.exact else self._exact_len

    def blocks(self) -> list[int]:
        """Blocks held, in slot order, without the holes."""
        return [block for block in self.block_ids if block is not None]

    def append(self, blocks: Sequence[int]) -> None:
        """Add room at the end."""
        self.block_ids.extend(blocks)
        self.version += 1

    def trim(self, num_blocks: int) -> list[int]:
        """Keep only the first entries. Returns: the blocks after them."""
        dropped = [block for block in self.block_ids[num_blocks:] if block is not None]
        if dropped:
            del self.block_ids[num_blocks:]
            self.version += 1
        return dropped

    def replace(self, index: int, block: int) -> None:
        """Point one entry to another block with the same content."""
        self.block_ids[index] = block
        self.version += 1

    def advance(self, num_tokens: int) -> None:
        """Count the next num_tokens slots as written."""
        self.logical_len += num_tokens
        self.physical_len += num_tokens

    def fork(self, num_blocks: int, keys: BlockKeys) -> BlockTable:
        """Return a copy with the first num_blocks entries."""
        blocks, entries = self.block_ids[:num_blocks], self.entries.copy()
        return dataclasses.replace(self, keys=keys, block_ids=blocks, entries=entries, version=0)

    def mark_inexact(self) -> None:
        """Mark everything written from here on as different from full attention."""
        self._exact_len = self.exact_len
        self.exact = False
        self.chain = None

    def shrink(self, block_ids: Sequence[int], num_tokens: int) -> None:
        """Set the table to these blocks, which hold num_tokens compacted slots; no token is unprocessed."""
        self.mark_inexact()
        self._exact_len = 0
        self.block_ids, self._num_holes = list(block_ids), 0
        self.physical_len = num_tokens
        self.version += 1

    def release_out_of_window(self, end: int) -> list[int]:
        """Leave holes before entry `end`; later tokens do not see those slots, so the sequence stays exact.
        Returns: the blocks that were there."""
        first = self._first
        if end <= first:
            return []
        blocks = [block for block in self.block_ids[first:end] if block is not None]
        self.block_ids[first:end] = [None] * (end - first)
        self._num_holes += len(blocks)
        self._first = end
        self.version += 1
        return blocks

    def drop(self, indices: Sequence[int], block_size: int) -> list[int]:
        """Remove these full entries, ascending; later ones move up. Returns: the blocks that were there."""
        dropped = set(indices)
        blocks = [block for block in map(self.block_ids.__getitem__, indices) if block is not None]
        assert len(dropped) == len(blocks) == len(indices), f"entries {indices}: a hole, or named twice"
        exact_len = self.exact_len
        self.mark_inexact()
        lost = (min(max(exact_len - index * block_size, 0), block_size) for index in indices)
        self._exact_len = exact_len - sum(lost)
        self.block_ids = [block for index, block in enumerate(self.block_ids) if index not in dropped]
        self.physical_len -= len(dropped) * block_size
        self.version += 1
        return blocks
