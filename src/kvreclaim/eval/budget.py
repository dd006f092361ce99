"""Budgets that are equal in bytes, whatever a token's K/V take."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvreclaim.compression_settings import AUTO
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import kv_format


@dataclass(frozen=True, slots=True)
class FormatStorage:
    """Bytes of a sequence's K/V in one format, beside the full cache's in the model's own dtype: of
    the layers that compression is about, without windows that have tables of their own.

    block_bytes:     of one block over these layers, scales and centres included
    reference_bytes: of one token in the model's own dtype: what a budget is a share of
    """

    name: str
    block_size: int
    block_bytes: int
    reference_bytes: int

    @classmethod
    def of(cls, name: str, facts: ModelFacts, block_size: int) -> FormatStorage:
        """The format that --kv-cache-dtype names. Raises: InvalidArgumentError."""
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
        """Tokens in as many whole blocks as take at most fraction x (bytes of num_tokens tokens in the
        model's dtype). Whole blocks: memory is held in them, and policies with unequal heads need it."""
        share = Fraction(str(fraction)) * num_tokens * self.reference_bytes
        return max(0, int(share // self.block_bytes)) * self.block_size

    def meets(self, fraction: float | None) -> bool:
        """Whether the full cache in this format takes no more than that share, so that nothing need go.

        False for a format that saves nothing: there, a share of 1 is a policy that is never asked. False for
        None, a budget in tokens: these are the same in every format."""
        if fraction is None:
            return False
        allowed = Fraction(str(fraction)) * self.reference_bytes * self.block_size
        return self.block_bytes <= allowed and self.block_bytes < self.reference_bytes * self.block_size

    def held_bytes(self, num_blocks: float) -> float:
        """Bytes of a sequence that holds so many blocks."""
        return num_blocks * self.block_bytes
