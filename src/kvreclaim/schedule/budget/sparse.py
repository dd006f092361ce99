"""Prompt tokens computed by attention over some of the blocks before them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SparseRows:
    """The rows of one method of sparse prefill. All in tokens.

    tile:  tokens that read the same blocks, counted from the prompt's first
    span:  tokens that are decided together: chunks and prefix hits end at multiples of it, so that the blocks
           read depend only on the prompt, not on its chunks; a multiple of the tile
    first: leading tokens that attend to everything before them
    last:  final prompt tokens that do so, too
    """

    tile: int
    span: int
    first: int
    last: int

    def rows(self, num_prompt: int, compress_prompt_at: int = 0) -> range:
        """Rows that read sparsely, both ends multiples of the span. Before compress_prompt_at, where a prefix
        is also kept for longer prompts, no tail is spared."""
        stop = max(num_prompt - self.last, compress_prompt_at) // self.span * self.span
        return range(self.start, max(self.start, stop))

    @property
    def start(self) -> int:
        return -(-self.first // self.span) * self.span

    def aligned(self, num_computed: int, num_tokens: int, stop: int) -> int:
        """Cut the next tokens at a multiple of the span, if they end between the first sparse row and
        stop."""
        end = num_computed + num_tokens
        if not self.start < end < stop:
            return num_tokens
        return max(0, end // self.span * self.span - num_computed)
