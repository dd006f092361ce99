"""Which blocks hold a window's part of which exact prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

Row = tuple[int, ...]
"""The blocks of the pool that hold one block of tokens in the layers of one window."""


class RowKey(NamedTuple):
    """serial: of the entry that holds the same tokens in the layers with full attention, which a walk through
    the prefix index has come to, so that all tokens before are equal, too; window: which one"""

    serial: int
    window: int


class WindowIndex:
    """Key to row, and block to key. An entry's serial is never given twice, so that a row whose entry is gone
    is only never asked for again."""

    def __init__(self) -> None:
        self._rows: dict[RowKey, Row] = {}
        self._keys: dict[int, RowKey] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: RowKey) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def find(self, key: RowKey) -> Row | None:
        return self._rows.get(key)

    def find_of(self, block: int) -> Row:
        """The row that a block is in."""
        return self._rows[self._keys[block]]

    def add(self, key: RowKey, row: Row) -> None:
        """The key leads nowhere yet, and the blocks are in no row."""
        assert key not in self._rows, f"{key} leads to {self._rows[key]} already"
        self._rows[key] = row
        for block in row:
            assert block not in self._keys, f"block {block} is in a row already"
            self._keys[block] = key

    def remove(self, block: int) -> Row:
        """Forget the row that a block is in. Returns: the row."""
        row = self._rows.pop(self._keys[block])
        for each in row:
            del self._keys[each]
        return row

    def clear(self) -> None:
        self._rows.clear()
        self._keys.clear()

    def check(self) -> None:
        """The two directions agree. Raises AssertionError."""
        blocks = {block: key for key, row in self._rows.items() for block in row}
        assert blocks == self._keys, f"{len(blocks)} blocks in rows, {len(self._keys)} with keys"
