"""The interface between the memory manager and a group of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import Entry
from kvreclaim.memory.prefix_cache import PrefixMatch


class GroupManager(ABC):
    """The blocks or states of sequences in layers of one kind: full attention, one window, or recurrent.

    All that take blocks share one pool. The manager checks every group before it changes one, and the group
    of full attention comes first. `table` is the sequence's table there, which has the lengths and the
    entries of the prefix index.

    Args:
        held: references to sources of copies that have not been made yet; all groups share the counter
    """

    miss: ClassVar[str]
    """Why an indexed block is no hit here (index.MISS_REASONS); not of full attention, where each is one."""

    def __init__(self, pool: BlockPool, block_size: int, held: Counter[int]) -> None:
        self.pool = pool
        self.block_size = block_size
        self._held = held

    @abstractmethod
    def fit(self, entries: Sequence[Entry], most: int) -> int:
        """Return how many of the first `most` entries a sequence can begin with. Changes nothing."""

    @abstractmethod
    def begin(self, seq_id: int, match: PrefixMatch, priority: int) -> None:
        """Begin a sequence with the blocks of a match."""

    @abstractmethod
    def fork(self, parent_id: int, child_id: int, child: BlockTable) -> None:
        """Let the child share the blocks that hold its tokens."""

    def has_room(self, seq_id: int, table: BlockTable, num_tokens: int) -> bool:
        """Return whether the blocks held here take num_tokens more, and the next written one is not shared.
        If False, call `missing` and `grow`."""
        return False

    @abstractmethod
    def missing(self, seq_id: int, table: BlockTable, num_tokens: int) -> int:
        """Return the blocks to take before num_tokens more are written. Changes nothing."""

    @abstractmethod
    def grow(
        self,
        seq_id: int,
        table: BlockTable,
        num_tokens: int,
        blocks: list[int],
        copies: list[tuple[int, int]],
        num_drafts: int = 0,
    ) -> None:
        """Take these blocks. Adds them to `blocks`, and (source, destination) of a shared, partly written
        block to `copies`; the source is released, but held.

        num_drafts: number of drafts at the end of these tokens
        """

    @abstractmethod
    def commit(self, seq_id: int, table: BlockTable, num_tokens: int) -> None:
        """Record num_tokens tokens as written: full blocks can be hit, blocks out of the window are freed."""

    @abstractmethod
    def free(self, seq_id: int, table: BlockTable) -> int:
        """Forget a sequence. Returns: blocks that went back to the pool."""

    @abstractmethod
    def blocks(self, seq_id: int, table: BlockTable) -> list[int]:
        """All blocks that a sequence holds here."""

    @abstractmethod
    def num_blocks(self, seq_id: int, table: BlockTable) -> int:
        """Number of these blocks."""

    @abstractmethod
    def check(self, seq_id: int, table: BlockTable) -> None:
        """Check that the sequence holds all that its next token needs. Raises: AssertionError."""
