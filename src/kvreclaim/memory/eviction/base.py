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

    watches: whether the pool must call entered, used and forgot
    """

    __slots__ = ()
    name: ClassVar[str]
    watches: ClassVar[bool] = True

    @abstractmethod
    def __init__(self, num_blocks: int) -> None:
        """Queue every block, in ascending order."""

    @abstractmethod
    def push(self, block: int) -> None:
        """Queue a block that has lost its last reference. It is not queued yet."""

    def push_first(self, block: int) -> None:
        """Queue a block for reuse before all others, if the order supports it. It is not queued yet."""
        self.push(block)

    @abstractmethod
    def pop(self) -> int:
        """Take the block to be reused next. There is one. A pinned block is only put aside by this."""

    @abstractmethod
    def remove(self, block: int) -> None:
        """Remove a queued block that is referenced again."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, block: int) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Iterate in the order of reuse. Valid only while the order is not changed; for checks."""

    @abstractmethod
    def check(self) -> None:
        """Check the structure. Raises: AssertionError."""

    @abstractmethod
    def entered(self, block: int, priority: int) -> None:
        """Note that a block in use can be hit from now on. priority: of the request that computed it; a lower
        number is more important"""

    @abstractmethod
    def used(self, block: int, priority: int) -> None:
        """Note that a request found a block's content, or computed the same. A queued block keeps its place
        until it is next released."""

    @abstractmethod
    def forgot(self, block: int) -> None:
        """Note that a block, queued, popped or in use, caches nothing any more."""
