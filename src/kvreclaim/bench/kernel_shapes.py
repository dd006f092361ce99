"""Shapes for kernel timing, and caches filled equally in every back-end."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import KVFormat, kv_format
from kvreclaim.ops.kv_cache import KVCache, PagedTokens

BLOCK_SIZE = 16
GROUP = 4


@dataclass(frozen=True)
class KernelShape:
    """batch sequences of context tokens each, blocks in random order.

    dtype:     of queries, and of keys and values before they are stored
    kv_format: of the stored ones; "auto": their dtype
    queries:   new tokens of each
    turns:     number of such sets, used in rotation, so that each is read from memory as it is when a
               sequence is compressed occasionally
    """

    context: int
    batch: int
    head_dim: int
    kv_heads: int
    dtype: torch.dtype
    layers: int = 8
    queries: int = 1
    turns: int = 1
    device: str = "cpu"
    kv_format: str = "auto"
    block_size: int = BLOCK_SIZE

    @property
    def format(self) -> KVFormat:
        return kv_format(self.kv_format, self.dtype)

    @property
    def blocks_each(self) -> int:
        return blocks_for(self.context, self.block_size)

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's key and value in one head, as stored, parameters included."""
        return self.format.unit_bytes(self.head_dim, self.head_dim, self.block_size) / self.block_size

    @property
    def side_bytes(self) -> int:
        """Bytes of the keys, or of the values, of all sequences in one layer, as stored."""
        return int(self.batch * self.context * self.kv_heads * self.token_bytes / 2)

    @property
    def plain_bytes(self) -> int:
        """Bytes of the keys, or of the values, before they are stored."""
        return self.batch * self.context * self.kv_heads * self.head_dim * self.dtype.itemsize

    def facts(self) -> tuple[LayerFacts, ...]:
        layer = LayerFacts(
            self.kv_heads * GROUP, self.kv_heads, self.head_dim, self.head_dim, Softmax(self.head_dim**-0.5)
        )
        return (layer,) * self.layers

    def describe(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        stored = "" if self.kv_format == "auto" else f", K/V in {self.kv_format}"
        return f"{self.context:,} x {self.batch}, D {self.head_dim}, {dtype}{stored}"


@dataclass(eq=False)
class Filled:
    """One back-end's cache with the shape's keys and values; equal numbers in every back-end."""

    backend: Backend
    shape: KernelShape
    cache: KVCache = field(init=False)
    turn: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        like = torch.empty(0, dtype=shape.dtype, device=shape.device)
        num_blocks = shape.batch * shape.turns * shape.blocks_each
        self.cache = self.backend.allocate(
            shape.facts(), num_blocks, shape.block_size, like=like, kv_format=shape.format
        )
        for layer in range(shape.layers):
            for number in range(shape.batch * shape.turns):
                k, v = self.tokens(layer, number)
                self.backend.write_kv(self.cache.layers[layer], k, v, self.slots[number])

    def tokens(self, layer: int, number: int) -> tuple[Tensor, Tensor]:
        """[context, K, D] keys and values of one sequence."""
        shape = self.shape
        generator = torch.Generator(shape.device).manual_seed(1000 * layer + number)
        size = (2, shape.context, shape.kv_heads, shape.head_dim)
        both = torch.randn(size, generator=generator, device=shape.device).to(shape.dtype)
        return both[0], both[1]

    @cached_property
    def tables(self) -> list[np.ndarray]:
        count = self.shape.batch * self.shape.turns
        order = np.random.default_rng(0).permutation(count * self.shape.blocks_each)
        return [np.ascontiguousarray(row) for row in order.astype(np.int32).reshape(count, -1)]

    @cached_property
    def ids(self) -> list[Tensor]:
        """[blocks] int64 of each sequence."""
        return [torch.from_numpy(row.astype(np.int64)).to(self.shape.device) for row in self.tables]

    @cached_property
    def slots(self) -> list[Tensor]:
        """[context] int64 of each sequence, as write_kv takes them."""
        tokens, size = torch.arange(self.shape.context, device=self.shape.device), self.shape.block_size
        return [row[tokens // size] * size + tokens % size for row in self.ids]

    @property
    def one(self) -> Tensor:
        """[blocks] int64 of the current sequence, for ops that take one sequence."""
        return self.ids[self.turn * self.shape.batch]

    def paged(self, layer: int, num_tokens: int | None = None) -> PagedTokens:
        """The current sequence's first tokens; None: all."""
        return PagedTokens(self.cache.layers[layer], self.one, num_tokens or self.shape.context)

    def gather(self, layer: int, num_tokens: int) -> Tensor:
        """[2, K, num_tokens, D]: contents of the current sequence's table."""
        return torch.stack(self.backend.gather_tokens(self.paged(layer, num_tokens)))

    @cached_property
    def batch(self) -> AttentionBatch:
        """A step in which every sequence computes its last `queries` tokens."""
        shape = self.shape
        tables = self.tables[: shape.batch]
        sequences = tuple(SequenceSlots(ids, shape.queries, shape.context) for ids in tables)
        return AttentionBatch.build(sequences, shape.block_size, torch.device(shape.device))
