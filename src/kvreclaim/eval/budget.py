"""Budgets that are equal in bytes, whatever a token's K/V take."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.kv_cache import bytes_per_block

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How a token's K/V are stored, and what the full cache would take for it.

    name:            as in the report
    token_bytes:     of one token over all layers as it is stored
    reference_bytes: of one token in the model's own dtype: what a budget is a share of
    """

    name: str
    token_bytes: int
    reference_bytes: int

    def budget_tokens(self, fraction: float, num_tokens: int, block_size: int) -> int:
        """Tokens in as many whole blocks as take at most fraction x (bytes of num_tokens tokens in the
        model's dtype). Whole blocks: memory is held in them, and policies with unequal heads need it."""
        share = Fraction(str(fraction)) * num_tokens * self.reference_bytes
        return int(share / (self.token_bytes * block_size)) * block_size


def kv_format(name: str, facts: ModelFacts) -> KVFormat:
    """The format that --kv-cache-dtype names. Raises: InvalidArgumentError."""
    own = str(facts.dtype).removeprefix("torch.")
    if name not in (AUTO, own):
        raise InvalidArgumentError(
            f"kv_cache_dtype is {name!r}; {facts.name} keeps its K/V in {own}: pass auto or {own}."
        )
    token_bytes = bytes_per_block(facts.layers, 1, facts.dtype)
    return KVFormat(own, token_bytes, reference_bytes=token_bytes)
