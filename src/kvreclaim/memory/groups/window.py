"""Layers that see the last tokens only: blocks inside each sequence's window, and those that left it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.groups.group import GroupManager
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import WINDOW, Entry
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.memory.windows import Row, RowKey, Window

TURN_TOKENS = 2048
"""A tail that an earlier turn has left stays worth keeping if the next one ends so many tokens later."""


@dataclass(slots=True, eq=False)
class WindowTable:
    """The blocks of one sequence in one window: position p lies in rows[p // block_size - first].

    first:   blocks of tokens before those of rows
    tails:   ends, in blocks of tokens, of windows that later requests may go on behind
    entered: entries of the prefix index with rows that were offered for hits
    version: changes whenever first or rows change
    """

    first: int = 0
    rows: list[Row] = field(default_factory=list)
    tails: tuple[int, ...] = ()
    entered: int = 0
    version: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def blocks(self) -> list[int]:
        return [block for row in self.rows for block in row]


class WindowGroup(GroupManager):
    """One window, sliding or in chunks. Positions are those in the text, independent of evictions elsewhere.

    A block that has left the window of its sequence may still be hit: the ones behind which a turn of a
    conversation ends wait for their reuse like any other cached block, all others are reused before those
    (vLLM issue 48435: else hits fall to nothing long before the pool is full).

    Args:
        window: what its layers see
        number: of this window among the memory's
    """

    miss = WINDOW

    def __init__(
        self, pool: BlockPool, block_size: int, held: Counter[int], window: Window, number: int
    ) -> None:
        super().__init__(pool, block_size, held)
        self.window, self.number = window, number
        self._tables: dict[int, WindowTable] = {}
        self._turns: dict[int, None] = {}
        """Serials of entries behind which a turn has ended, while they may be live; the oldest first."""

    def table(self, seq_id: int) -> WindowTable:
        """Return the sequence's live table; read-only."""
        return self._tables[seq_id]

    def _row(self, entry: Entry) -> Row | None:
        return self.pool.rows.find(RowKey(entry.serial, self.number))

    # Hits.

    def fit(self, entries: Sequence[Entry], most: int) -> int:
        return self.window.fit(lambda i: self._row(entries[i]) is not None, most, self.block_size)

    def hits(self, entries: Sequence[Entry]) -> tuple[Row, ...]:
        """Return the rows that a sequence which begins with these entries sees; fit allows all of them."""
        first = self.window.first_entry(len(entries), self.block_size)
        rows = [self._row(entry) for entry in entries[first:]]
        assert None not in rows, f"window {self.number} lacks a row behind {len(entries)} entries"
        return tuple(row for row in rows if row is not None)

    def begin(self, seq_id: int, match: PrefixMatch, priority: int) -> None:
        rows, num_hit = match.windows[self.number], len(match.entries)
        self.pool.hit([block for row in rows for block in row], priority)
        end = max(0, match.keys.num_tokens - 1) // self.block_size
        tails = (end, num_hit) if (end - num_hit) * self.block_size >= TURN_TOKENS else (end,)
        self._tables[seq_id] = WindowTable(num_hit - len(rows), list(rows), tails, num_hit)
        self._supersede(match.entries, end)

    def _supersede(self, entries: Sequence[Entry], end: int) -> None:
        """Demote the rows of earlier turns that end near this sequence's own end, where the next begins."""
        first = max(0, end - TURN_TOKENS // self.block_size)
        for i in range(len(entries) - 1, first - 1, -1):
            if entries[i].serial not in self._turns:
                continue
            del self._turns[entries[i].serial]
            for entry in entries[self.window.first_entry(i + 1, self.block_size) : i + 1]:
                if (row := self._row(entry)) is not None:
                    self.pool.demote(row)

    def _note_turn(self, main: BlockTable, end: int) -> None:
        """Note that a turn ends after this many blocks of tokens of this sequence."""
        if 0 < end <= len(main.entries):
            self._turns[main.entries[end - 1].serial] = None
            if len(self._turns) > self.pool.num_blocks:
                del self._turns[next(iter(self._turns))]

    # Growth.

    def has_room(self, seq_id: int, table: BlockTable, num_tokens: int) -> bool:
        own, start, size = self._tables[seq_id], table.logical_len, self.block_size
        if start + num_tokens > own.end * size:
            return False
        return not start % size or self.pool.refs[own.rows[start // size - own.first][0]] == 1

    def missing(self, seq_id: int, table: BlockTable, num_tokens: int) -> int:
        own, start = self._tables[seq_id], table.logical_len
        rows = max(0, blocks_for(start + num_tokens, self.block_size) - own.end)
        shared = num_tokens > 0 and self._shared(own, start) is not None
        return self.window.num_blocks * (rows + shared)

    def grow(
        self,
        seq_id: int,
        table: BlockTable,
        num_tokens: int,
        blocks: list[int],
        copies: list[tuple[int, int]],
        num_drafts: int = 0,
    ) -> None:
        own, start, width = self._tables[seq_id], table.logical_len, self.window.num_blocks
        if num_tokens and (place := self._shared(own, start)) is not None:
            old, new = own.rows[place], tuple(self.pool.allocate(width))
            own.rows[place] = new
            self._held.update(old)
            copies += zip(old, new, strict=True)
            own.version += 1
        count = blocks_for(start + num_tokens, self.block_size) - own.end
        if count > 0:
            taken = self.pool.allocate(count * width)
            blocks += taken
            own.rows += [tuple(taken[i : i + width]) for i in range(0, len(taken), width)]
            own.version += 1

    def _shared(self, own: WindowTable, start: int) -> int | None:
        """The place of the row that position `start` lies in, if it is begun and others hold it, too."""
        index, used = divmod(start, self.block_size)
        if not used:
            return None
        block = own.rows[index - own.first][0]
        return index - own.first if self.pool.refs[block] - self._held[block] > 1 else None

    def commit(self, seq_id: int, table: BlockTable, num_tokens: int) -> None:
        own, entries, entered = self._tables[seq_id], table.entries, self._tables[seq_id].entered
        for i in range(max(entered, own.first), len(entries)):
            key = RowKey(entries[i].serial, self.number)
            self.pool.enter_row(key, own.rows[i - own.first], table.priority)
        own.entered = len(entries)
        self._release_unseen(own, self.window.first_seen(table.logical_len) // self.block_size)
        for end in own.tails:
            if entered < end <= len(entries):
                self._note_turn(table, end)

    def _release_unseen(self, own: WindowTable, first: int) -> None:
        """Let go of the rows before the block of tokens `first`."""
        count = min(first - own.first, len(own.rows))
        if count <= 0:
            return
        for i, row in enumerate(own.rows[:count], own.first):
            is_tail = any(self.window.first_entry(end, self.block_size) <= i < end for end in own.tails)
            (self.pool.release if is_tail else self.pool.release_first)(row)
        del own.rows[:count]
        own.first += count
        own.version += 1

    # The rest of a sequence's life.

    def fork(self, parent_id: int, child_id: int, child: BlockTable) -> None:
        own = self._tables[parent_id]
        rows = own.rows[: blocks_for(child.logical_len, self.block_size) - own.first]
        for row in rows:
            for block in row:
                self.pool.touch(block)
        self._tables[child_id] = replace(own, rows=rows, version=0)

    def free(self, seq_id: int, table: BlockTable) -> int:
        self._note_turn(table, len(table.entries))  # what it still sees is what its next turn goes on behind
        return self.pool.release(reversed(self._tables.pop(seq_id).blocks()))

    def blocks(self, seq_id: int, table: BlockTable) -> list[int]:
        return self._tables[seq_id].blocks()

    def num_blocks(self, seq_id: int, table: BlockTable) -> int:
        return self.window.num_blocks * len(self._tables[seq_id].rows)

    def check(self, seq_id: int, table: BlockTable) -> None:
        own, length = self._tables[seq_id], table.logical_len
        first = self.window.first_seen(length) // self.block_size
        assert own.first == first, (
            f"sequence {seq_id}: its window begins at block {own.first}, it sees from {first} on"
        )
        assert own.end >= blocks_for(length, self.block_size), f"sequence {seq_id}: {length} tokens written"
