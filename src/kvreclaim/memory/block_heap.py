"""Blocks in ascending order of a key."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key", int, float, tuple[int, int])
_SLACK = 64


class BlockHeap(Generic[Key]):
    """Each block at most once, the smallest key first; any block can leave.

    A block that leaves or changes its key stays behind in the heap as a dead item, which is skipped
    when it is popped. As soon as more items are dead than alive, the heap is rebuilt: every
    operation is O(log n) amortised, and the heap never holds more than 2 n + 64 items.
    """

    __slots__ = ("_items", "_keys")

    def __init__(self) -> None:
        self._items: list[tuple[Key, int]] = []
        self._keys: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __iter__(self) -> Iterator[int]:
        """Iterate by ascending key, O(n log n). Valid only while nothing changes."""
        return iter(block for _, block in sorted((key, block) for block, key in self._keys.items()))

    def key(self, block: int) -> Key:
        """Return the key of a block in the heap."""
        return self._keys[block]

    def push(self, block: int, key: Key) -> None:
        """Add a block, or give it another key."""
        self._keys[block] = key
        heappush(self._items, (key, block))
        self._tidy()

    def remove(self, block: int) -> None:
        """Remove a block in the heap."""
        del self._keys[block]
        self._tidy()

    def first(self) -> tuple[Key, int] | None:
        """Return the smallest key and its block; None if the heap is empty."""
        while self._items:
            key, block = self._items[0]
            if self._keys.get(block) == key:
                return key, block
            heappop(self._items)
        return None

    def pop(self) -> int:
        """Remove the block with the smallest key. The heap must not be empty."""
        while True:
            key, block = heappop(self._items)
            if self._keys.get(block) == key:
                self.remove(block)
                return block

    def _tidy(self) -> None:
        if len(self._items) > 2 * len(self._keys) + _SLACK:
            self._items = [(key, block) for block, key in self._keys.items()]
            heapify(self._items)

    def check(self) -> None:
        """Check that every block's key is in the heap, and few others are. Raises: AssertionError."""
        items = set(self._items)
        missing = [block for block, key in self._keys.items() if (key, block) not in items]
        assert not missing, f"block {missing[0]} is not in the heap under its key"
        assert len(self._items) <= 2 * len(self._keys) + _SLACK, (
            f"{len(self._items)} items for {len(self._keys)} blocks"
        )
