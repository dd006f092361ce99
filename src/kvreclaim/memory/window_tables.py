"""The windows of the sequences: what each still sees, and which blocks have left its window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import Entry
from kvreclaim.memory.windows.index import Row, RowKey
from kvreclaim.memory.windows.window import Window

TURN_TOKENS = 2048
"""A tail that an earlier turn has left stays worth keeping if the next one ends so many tokens later."""


@dataclass(slots=True, eq=False)
class WindowTable:
    """What one sequence holds of one window: position p lies in rows[p // block_size - first].

    first:   blocks of tokens before those of rows
    tails:   ends, in blocks of tokens, of windows that later requests may go on behind
    version: changes whenever first or rows change
    """

    first: int = 0
    rows: list[Row] = field(default_factory=list)
    tails: tuple[int, ...] = ()
    version: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def blocks(self) -> Iterator[int]:
        return (block for row in self.rows for block in row)


class Windows:
    """The windows of every sequence. Positions are those in the text, whatever was evicted elsewhere.

    A block that has left every window of its sequence may still be hit: the ones behind which a turn of a
    conversation ends wait for their reuse like any other cached block, all others are reused before those
    (vLLM issue 48435: else hits fall to nothing long before the pool is full).
    """

    def __init__(self, pool: BlockPool, block_size: int, windows: Sequence[Window]) -> None:
        self.windows = tuple(windows)
        self._pool = pool
        self._size = block_size
        self._tables: dict[int, tuple[WindowTable, ...]] = {}
        self._kept: dict[int, None] = {}
        """Serials of entries behind which a turn has ended, while they may be live; the oldest first."""

    def tables(self, seq_id: int) -> tuple[WindowTable, ...]:
        """One for each window: read them, don't change them."""
        return self._tables[seq_id]

    def num_blocks(self, seq_id: int) -> int:
        """Blocks of the pool that a sequence holds here."""
        return sum(
            window.num_blocks * len(table.rows)
            for window, table in zip(self.windows, self._tables.get(seq_id, ()), strict=False)
        )

    def blocks(self, seq_id: int) -> list[int]:
        """Blocks that a sequence holds here."""
        return [block for table in self._tables.get(seq_id, ()) for block in table.blocks()]

    def every_block(self) -> Iterator[int]:
        """Blocks of all sequences, one for each reference; for checks."""
        return (block for seq_id in self._tables for block in self.blocks(seq_id))

    # Hits.

    def fit(self, entries: Sequence[Entry]) -> int:
        """How many of these leading entries can be hit: behind them every window is there, too."""
        length, before = len(entries), -1
        while length != before:
            before = length
            for n, window in enumerate(self.windows):
                length = window.fit(partial(self._is_there, n, entries), length, self._size)
        return length

    def _is_there(self, n: int, entries: Sequence[Entry], i: int) -> bool:
        return RowKey(entries[i].serial, n) in self._pool.rows

    def hits(self, entries: Sequence[Entry]) -> tuple[tuple[Row, ...], ...]:
        """For each window the rows that a sequence sees which begins with these entries; fit has said yes."""
        found = []
        for n, window in enumerate(self.windows):
            first = window.first_entry(len(entries), self._size)
            rows = [self._pool.rows.find(RowKey(entry.serial, n)) for entry in entries[first:]]
            assert None not in rows, f"window {n} lacks a row behind {len(entries)} entries"
            found.append(tuple(row for row in rows if row is not None))
        return tuple(found)

    def begin(
        self,
        seq_id: int,
        entries: Sequence[Entry],
        hits: tuple[tuple[Row, ...], ...],
        num_tokens: int,
        priority: int,
    ) -> None:
        """A sequence of so many known tokens begins with these entries, behind the rows of hits."""
        end, num_hit = max(0, num_tokens - 1) // self._size, len(entries)
        tails = (end, num_hit) if (end - num_hit) * self._size >= TURN_TOKENS else (end,)
        tables = []
        for rows in hits or ((),) * len(self.windows):
            self._pool.hit([block for row in rows for block in row], priority)
            tables.append(WindowTable(num_hit - len(rows), list(rows), tails))
        self._tables[seq_id] = tuple(tables)
        self._supersede(entries, end)

    def _supersede(self, entries: Sequence[Entry], end: int) -> None:
        """Earlier turns of what a sequence goes on with end near its own: who comes next goes on behind that,
        and the rows before theirs are no longer worth more than others."""
        first = max(0, end - TURN_TOKENS // self._size)
        for i in range(len(entries) - 1, first - 1, -1):
            if entries[i].serial not in self._kept:
                continue
            del self._kept[entries[i].serial]
            for n, window in enumerate(self.windows):
                for entry in entries[window.first_entry(i + 1, self._size) : i + 1]:
                    if (row := self._pool.rows.find(RowKey(entry.serial, n))) is not None:
                        self._pool.demote(row)

    def _note_turn(self, main: BlockTable, end: int) -> None:
        """A turn ends behind so many blocks of tokens of this sequence."""
        if 0 < end <= len(main.entries):
            self._kept[main.entries[end - 1].serial] = None
            if len(self._kept) > self._pool.num_blocks:
                del self._kept[next(iter(self._kept))]

    # Growth.

    def missing(self, seq_id: int, start: int, num_tokens: int, held: Counter[int]) -> int:
        """Blocks to take before the tokens from position `start` on are written."""
        count = 0
        for window, table in zip(self.windows, self._tables[seq_id], strict=True):
            rows = blocks_for(start + num_tokens, self._size) - table.end
            count += window.num_blocks * (max(0, rows) + (self._shared(table, start, held) is not None))
        return count

    def grow(
        self, seq_id: int, start: int, num_tokens: int, held: Counter[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Make room for them. Returns: new blocks, and (source, destination) of those that are copied before
        they are written; both belong to the sequence. Sources are released, but held."""
        taken: list[int] = []
        copies: list[tuple[int, int]] = []
        for window, table in zip(self.windows, self._tables[seq_id], strict=True):
            if (place := self._shared(table, start, held)) is not None:
                old, new = table.rows[place], tuple(self._pool.allocate(window.num_blocks))
                table.rows[place] = new
                held.update(old)
                copies += zip(old, new, strict=True)
                table.version += 1
            count = blocks_for(start + num_tokens, self._size) - table.end
            if count > 0:
                blocks = self._pool.allocate(count * window.num_blocks)
                taken += blocks
                supply = iter(blocks)
                table.rows += [tuple(next(supply) for _ in range(window.num_blocks)) for _ in range(count)]
                table.version += 1
        return taken, copies

    def _shared(self, table: WindowTable, start: int, held: Counter[int]) -> int | None:
        """The place of the row that position `start` lies in, if it is begun and others hold it, too."""
        index, used = divmod(start, self._size)
        if not used:
            return None
        row = table.rows[index - table.first]
        return index - table.first if self._pool.refs[row[0]] - held[row[0]] > 1 else None

    def advance(self, seq_id: int, main: BlockTable, num_entered: int) -> None:
        """The sequence's lengths have advanced: what is full can be hit under the entries from num_entered
        on, and what no later token sees is let go."""
        for n, (window, table) in enumerate(zip(self.windows, self._tables[seq_id], strict=True)):
            for i in range(max(num_entered, table.first), len(main.entries)):
                self._pool.enter_row(
                    RowKey(main.entries[i].serial, n), table.rows[i - table.first], main.priority
                )
            self._let_go(window, table, window.first_seen(main.logical_len) // self._size)
        for end in self._tables[seq_id][0].tails:
            if num_entered < end <= len(main.entries):
                self._note_turn(main, end)

    def _let_go(self, window: Window, table: WindowTable, first: int) -> None:
        count = min(first - table.first, len(table.rows))
        if count <= 0:
            return
        for i, row in enumerate(table.rows[:count], table.first):
            is_tail = any(window.first_entry(end, self._size) <= i < end for end in table.tails)
            (self._pool.release if is_tail else self._pool.release_first)(row)
        del table.rows[:count]
        table.first += count
        table.version += 1

    # The rest of a sequence's life.

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """The child shares what holds the first num_tokens positions."""
        tables = []
        for table in self._tables[parent_id]:
            rows = table.rows[: blocks_for(num_tokens, self._size) - table.first]
            for row in rows:
                for block in row:
                    self._pool.touch(block)
            tables.append(replace(table, rows=rows, version=0))
        self._tables[child_id] = tuple(tables)

    def free(self, seq_id: int, main: BlockTable) -> int:
        """Forget a sequence; what it still sees is what its next turn goes on behind. Returns: blocks that
        went back to the pool."""
        if self.windows:
            self._note_turn(main, len(main.entries))
        tables = self._tables.pop(seq_id, ())
        return sum(self._pool.release(reversed(list(table.blocks()))) for table in tables)

    def invalidate(self, seq_id: int) -> None:
        """Nothing finds the sequence's blocks any more."""
        for block in self.blocks(seq_id):
            self._pool.unindex(block)

    def open_blocks(self, seq_id: int, num_tokens: int) -> list[int]:
        """The blocks that positions from num_tokens on go to, one that holds some already included."""
        place = num_tokens // self._size
        tables = self._tables.get(seq_id, ())
        return [block for table in tables for row in table.rows[place - table.first :] for block in row]

    def check(self, mains: dict[int, BlockTable]) -> None:
        """Every sequence holds what its next token sees. Raises AssertionError."""
        assert not self.windows or self._tables.keys() == mains.keys(), "not every sequence has its windows"
        for seq_id, tables in self._tables.items():
            length = mains[seq_id].logical_len
            for window, table in zip(self.windows, tables, strict=True):
                first = window.first_seen(length) // self._size
                assert table.first == first, (
                    f"sequence {seq_id}: its window begins at block {table.first}, it sees from {first} on"
                )
                assert table.end >= blocks_for(length, self._size), (
                    f"sequence {seq_id}: {length} tokens written"
                )
