"""Budgets of equal bytes, for any KV format."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvreclaim.compression_settings import AUTO
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import kv_format


@dataclass(frozen=True, slots=True)
class FormatStorage:
    """Bytes of a sequence's K/V in one format, compared with the model's own dtype: only of layers that are
    compressed, without windows that have tables of their own.

    block_bytes:     of one block over these layers, scales and centres included
    reference_bytes: of one token in the model's own dtype, of which a budget is a share
    """

    name: str
    block_size: int
    block_bytes: int
    reference_bytes: int

    @classmethod
    def of(cls, name: str, facts: ModelFacts, block_size: int) -> FormatStorage:
        """Return the format for a --kv-cache-dtype. Raises: InvalidArgumentError."""
        form, own = kv_format(name, facts.dtype), kv_format(AUTO, facts.dtype)
        return cls(
            name=form.name,
            block_size=block_size,
            block_bytes=form.bytes_per_block(facts.layers, block_size),
            reference_bytes=own.bytes_per_block(facts.layers, 1),
        )

    @property
    def token_bytes(self) -> float:
        """Bytes of one token over these layers, in a full block."""
        return self.block_bytes / self.block_size

    def budget_tokens(self, fraction: float, num_tokens: int) -> int:
        """Return the tokens in whole blocks that take at most fraction x (bytes of num_tokens tokens in the
        model's dtype). Memory is held in whole blocks, and policies with unequal heads need them."""
        share = Fraction(str(fraction)) * num_tokens * self.reference_bytes
        return max(0, int(share // self.block_bytes)) * self.block_size

    def meets(self, fraction: float | None) -> bool:
        """Whether the full cache in this format takes at most that share, so that nothing is evicted.

        False for a format that saves nothing: there, a share of 1 is a policy that never compresses; and for
        None, a budget in tokens.
        """
        if fraction is None:
            return False
        allowed = Fraction(str(fraction)) * self.reference_bytes * self.block_size
        return self.block_bytes <= allowed and self.block_bytes < self.reference_bytes * self.block_size

    def held_bytes(self, num_blocks: float) -> float:
        """Bytes of a sequence with this number of blocks."""
        return num_blocks * self.block_bytes
