"""A sliding window as the memory sees it."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.memory.blocks import blocks_for


@dataclass(frozen=True, slots=True)
class Window:
    """Layers that attend to the last tokens only.

    num_tokens: that a query sees, itself included; at least 1
    num_blocks: of the pool for every block of tokens: so many groups of layers have this window, each as many
                layers as a block has room for
    """

    num_tokens: int
    num_blocks: int

    def first_seen(self, position: int) -> int:
        """The first position that a query at this one sees."""
        return max(0, position - self.num_tokens + 1)

    def entries_before(self, block_size: int) -> int:
        """Blocks of tokens before a block's first token that it sees."""
        return blocks_for(self.num_tokens - 1, block_size)

    def most_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Blocks of the pool that a sequence of so many tokens holds at most, of which `chunk` are computed
        at once."""
        span = blocks_for(self.num_tokens - 2 + chunk, block_size) + 1
        return self.num_blocks * min(blocks_for(num_tokens, block_size), span)
