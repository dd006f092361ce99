"""Windows of attention as the memory sees them: sliding ones, and chunks; and the index of the blocks that
hold a window's part of an exact prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvreclaim.memory.blocks import blocks_for


@dataclass(frozen=True, slots=True)
class Window:
    """Layers that attend to the last tokens only.

    num_tokens: that a query sees at most, itself included; at least 1
    num_blocks: of the pool for every block of tokens: so many groups of layers have this window, each as many
                layers as a block has room for
    """

    num_tokens: int
    num_blocks: int = 1

    def __str__(self) -> str:
        return f"window {self.num_tokens}"

    def first_seen(self, position: int) -> int:
        """Return the first position that a query at this one sees."""
        return max(0, position - self.num_tokens + 1)

    def first_entry(self, end: int, block_size: int) -> int:
        """Return the first block of tokens that a token sees which comes behind `end` of them."""
        return max(0, end - blocks_for(self.num_tokens - 1, block_size))

    def fit(self, is_there: Callable[[int], bool], most: int, block_size: int) -> int:
        """The longest beginning, of `most` blocks of tokens at most, behind which all is there that its next
        token sees."""
        end = most
        while end:
            seen = range(end - 1, self.first_entry(end, block_size) - 1, -1)
            gap = next((i for i in seen if not is_there(i)), None)
            if gap is None:
                break
            end = gap
        return end

    def most_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Blocks of the pool that a sequence of so many tokens holds at most, of which `chunk` are computed
        at once."""
        span = blocks_for(self.num_tokens - 2 + chunk, block_size) + 1
        return self.num_blocks * min(blocks_for(num_tokens, block_size), span)


@dataclass(frozen=True, slots=True)
class ChunkedWindow(Window):
    """Layers that attend within chunks of num_tokens, a multiple of the block size (Llama 4): a chunk's first
    token sees nothing before itself."""

    def __str__(self) -> str:
        return f"chunks of {self.num_tokens}"

    def first_seen(self, position: int) -> int:
        return position // self.num_tokens * self.num_tokens

    def first_entry(self, end: int, block_size: int) -> int:
        return self.first_seen(end * block_size) // block_size

    def most_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        span = blocks_for(self.num_tokens - 1 + chunk, block_size)
        return self.num_blocks * min(blocks_for(num_tokens, block_size), span)


class Place(NamedTuple):
    """Place of a layer's keys and values: a table, and the layer's index inside that table's blocks. Table 0
    is for the layers with full attention; the windows' groups follow."""

    table: int
    layer: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """full: the layers with full attention, as many as a block has room for; places: of every layer"""

    full: tuple[int, ...]
    windows: tuple[Window, ...]
    places: tuple[Place, ...]


def grouping(windows: Sequence[Window | None]) -> Grouping | None:
    """Group layers with these windows (None: full attention). Layers of one window form as many groups as
    needed, each with as many layers as have full attention; the last group may have fewer. Returns None
    without both kinds: all layers share one table.

    Source: vLLM, v1/core/kv_cache_utils.py (groups of equally many layers over one pool).
    """
    full = tuple(n for n, window in enumerate(windows) if window is None)
    if not full or len(full) == len(windows):
        return None
    places = {layer: Place(0, n) for n, layer in enumerate(full)}
    found: list[Window] = []
    tables = 1
    kinds = {window for window in windows if window is not None}
    for kind in sorted(kinds, key=lambda window: (window.num_tokens, str(window))):
        members = [n for n, own in enumerate(windows) if own == kind]
        for n, layer in enumerate(members):
            places[layer] = Place(tables + n // len(full), n % len(full))
        found.append(replace(kind, num_blocks=-(-len(members) // len(full))))
        tables += found[-1].num_blocks
    return Grouping(full, tuple(found), tuple(places[n] for n in range(len(windows))))


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
