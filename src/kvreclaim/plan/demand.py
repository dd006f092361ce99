"""Blocks and bytes of sequences: alone, over a shared prefix, under a budget."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.kv_bytes import KVBytes
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.plan.shapes import ModelShape
from kvreclaim.plan.weights import state_bytes
from kvreclaim.schedule.budget.footprint import Footprint


@dataclass(frozen=True, slots=True)
class Cache:
    """A model's keys and values in one engine. footprint: has block size and budget."""

    shape: ModelShape
    form: KVBytes
    footprint: Footprint

    @property
    def block_size(self) -> int:
        return self.footprint.block_size

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes(self.form, self.block_size)

    @property
    def token_bytes(self) -> float:
        """Bytes per token, with its share of the block's own bytes."""
        return self.block_bytes / self.block_size

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent states per sequence of any length; 0 without recurrent layers."""
        return state_bytes(self.shape)

    def held(self, num_tokens: int) -> int:
        """Slots at most while a sequence of this length decodes, between two passes."""
        return self.footprint.slots_needed(1, num_tokens)

    def blocks(self, num_tokens: int) -> int:
        """Blocks for `held`."""
        return blocks_for(self.held(num_tokens), self.block_size)

    def prompt_blocks(self, num_tokens: int) -> int:
        """Maximum number of blocks while a prompt of this length is computed in chunks."""
        return blocks_for(self.footprint.slots_needed(num_tokens, num_tokens), self.block_size)

    def expanded_token_bytes(self) -> int | None:
        """Bytes per token of a latent cache in 16 bits if keys and values of every head were stored."""
        if not any(layer.latent for layer in self.shape.layers):
            return None
        return 2 * sum(layer.expanded for layer in self.shape.layers)


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """Sequences over one prefix, each with tokens of its own behind it.

    shared, unshared: blocks in all, without compression; only full blocks of the prefix are shared
    compressed:       blocks in all while every sequence decodes under the budget; equal to shared where
                      nothing is evicted. A compressed sequence shares nothing
    """

    sequences: int
    prefix: int
    own: int
    full: int
    private: int
    unshared: int
    compressed: int

    @property
    def shared(self) -> int:
        return self.full + self.sequences * self.private


def shared_load(cache: Cache, sequences: int, prefix: int, own: int) -> SharedLoad:
    """Blocks of so many sequences of prefix + own tokens."""
    size = cache.block_size
    full, rest = divmod(prefix, size)
    private = blocks_for(rest + own, size)
    total = prefix + own
    held = cache.blocks(total)
    whole = blocks_for(total, size)
    compressed = sequences * held if held < whole else full + sequences * private
    return SharedLoad(
        sequences,
        prefix,
        own,
        full=full,
        private=private,
        unshared=sequences * whole,
        compressed=compressed,
    )
