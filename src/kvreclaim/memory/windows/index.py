"""Index of the blocks that hold a window's part of an exact prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

Row = tuple[int, ...]
"""The blocks of the pool that hold one block of tokens in the layers of one window."""


class RowKey(NamedTuple):
    """serial: of the entry with the same tokens in the full-attention layers; a walk through the prefix index
    has reached it, so that all tokens before are equal too; window: index of the window"""

    serial: int
    window: int


class WindowIndex:
    """Maps keys to rows, and blocks to keys. Serials are unique, so a row with an evicted entry is never
    found again."""

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
        """Return the row of a block."""
        return self._rows[self._keys[block]]

    def add(self, key: RowKey, row: Row) -> None:
        """Add a row. Its key must be new, and its blocks in no row."""
        assert key not in self._rows, f"{key} leads to {self._rows[key]} already"
        self._rows[key] = row
        for block in row:
            assert block not in self._keys, f"block {block} is in a row already"
            self._keys[block] = key

    def remove(self, block: int) -> Row:
        """Forget the row of a block. Returns: the row."""
        row = self._rows.pop(self._keys[block])
        for each in row:
            del self._keys[each]
        return row

    def clear(self) -> None:
        self._rows.clear()
        self._keys.clear()

    def check(self) -> None:
        """Check that the two directions agree. Raises: AssertionError."""
        blocks = {block: key for key, row in self._rows.items() for block in row}
        assert blocks == self._keys, f"{len(blocks)} blocks in rows, {len(self._keys)} with keys"
