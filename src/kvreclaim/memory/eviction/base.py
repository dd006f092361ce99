"""The interface of eviction orders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar


class EvictionOrder(ABC):
    """The blocks without references, in the order in which they are reused.

    At the start every block is queued, in ascending order, and caches nothing. The pool alone calls
    what changes an order; it releases a sequence's blocks last first, so that of two blocks of one
    chain the deeper one is queued before the other, and nothing is hit without all that lies before
    it. Given that, no order reuses a block while one behind it in its chain is still queued: a child is
    worth nothing without its parent.

    watches: whether the pool must tell what happens to cached blocks (entered, used, forgot)
    """

    __slots__ = ()
    name: ClassVar[str]
    watches: ClassVar[bool] = True

    @abstractmethod
    def __init__(self, num_blocks: int) -> None:
        """Queue every block, in ascending order."""

    @abstractmethod
    def push(self, block: int) -> None:
        """The last reference to this block has gone. It is not queued."""

    def push_first(self, block: int) -> None:
        """A block that is not queued is to be reused before all others, if the order knows such a place."""
        self.push(block)

    @abstractmethod
    def pop(self) -> int:
        """Take the block to be reused next. There is one. A pinned block is only put aside by this."""

    @abstractmethod
    def remove(self, block: int) -> None:
        """A queued block is referenced again."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, block: int) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """In the order of reuse. Valid only while the order is not changed; for checks."""

    @abstractmethod
    def check(self) -> None:
        """The structure is sound. Raises AssertionError."""

    @abstractmethod
    def entered(self, block: int, priority: int) -> None:
        """A block in use can be hit from now on. priority: of the request that computed it; a lower number
        is more important"""

    @abstractmethod
    def used(self, block: int, priority: int) -> None:
        """A request came upon what a block caches: it was found, or computed the same. If the block is
        queued it keeps its place until it is next released."""

    @abstractmethod
    def forgot(self, block: int) -> None:
        """A block, queued, popped or in use, caches nothing any more."""
