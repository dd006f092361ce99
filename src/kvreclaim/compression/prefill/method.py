"""The interface of a sparse-prefill method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvreclaim.checks import check_int, require
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.facts import LayerFacts, ModelFacts, Softmax
from kvreclaim.schedule.budget.sparse import SparseRows

ROWS = 128
"""Default query rows of a tile, over all query heads of a KV head."""
MAX_ELEMENTS = 1 << 24
"""Limit of logits in memory; more tiles are processed in pieces."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Query rows of one sequence in one layer: n tiles of at most R consecutive tokens, and the keys before
    each. Blocks of B tokens, counted from the sequence's first slot, are read or skipped. `past` of them lie
    wholly before a tile; slots after those are always read.

    layer:   index of the cache layer
    positions: position of each tile's first token in the text
    queries: [n, R, H, D]; rows beyond a tile's length are undefined
    lengths: [n] int64 tokens of each tile
    ends:    [n, K] int64, slots up to the tile's last token, itself included
    past:    [n, K] int64
    block:   B
    softmax: the layer's softmax; its sinks are ignored
    keys:    (first, stop) -> [K, stop - first, D] fp32: slots first .. stop - 1 of every head, as cached;
             undefined beyond a head's length
    """

    layer: int
    positions: tuple[int, ...]
    queries: Tensor
    lengths: Tensor
    ends: Tensor
    past: Tensor
    block: int
    softmax: Softmax
    keys: Callable[[int, int], Tensor]

    @cached_property
    def num_blocks(self) -> int:
        """N: the largest number of blocks before a tile."""
        return int(self.past.max())

    @cached_property
    def visible(self) -> Tensor:
        """Mask [n, K, N] of blocks before the tile."""
        return torch.arange(self.num_blocks, device=self.past.device) < self.past[..., None]

    @cached_property
    def is_row(self) -> Tensor:
        """Mask [n, R] of the tile's rows."""
        return torch.arange(self.queries.shape[1], device=self.past.device) < self.lengths[:, None]

    @cached_property
    def means(self) -> Tensor:
        """Mean key of each block, [K, N, D] fp32."""
        step = max(1, MAX_ELEMENTS // (self.past.shape[1] * self.block * self.queries.shape[-1]))
        pieces = []
        for first in range(0, self.num_blocks, step):
            stop = min(first + step, self.num_blocks)
            keys = self.keys(first * self.block, stop * self.block)
            pieces.append(keys.unflatten(1, (stop - first, self.block)).mean(2))
        return torch.cat(pieces, 1)

    def by_head(self) -> Tensor:
        """Return queries [n, K, R, G, D] fp32, grouped by KV head."""
        grouped = self.queries.float().unflatten(2, (self.past.shape[1], -1))
        return grouped.transpose(1, 2)

    def scaled(self, products: Tensor) -> Tensor:
        """Turn products q.k into logits."""
        logits, cap = products * self.softmax.scale, self.softmax.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def part(self, at: slice) -> Tiles:
        """Return some of the tiles, over the same blocks."""
        found = Tiles(
            self.layer,
            self.positions[at],
            self.queries[at],
            self.lengths[at],
            self.ends[at],
            self.past[at],
            self.block,
            self.softmax,
            self.keys,
        )
        found.__dict__["num_blocks"], found.__dict__["means"] = self.num_blocks, self.means
        return found


@dataclass(frozen=True)
class SparsePrefill(ABC):
    """A sparse-prefill method. A subclass chooses the blocks that a tile reads besides the nearest ones.

    first:  leading tokens of a prompt with dense attention
    last:   last tokens of a prompt with dense attention
    layers: leading layers with dense attention
    block:  tokens of a block that is read or skipped; a multiple of the KV cache's block size
    """

    name: ClassVar[str]
    slow: ClassVar[bool] = False
    """True if choosing blocks costs about as much as it saves (docs/prompts.md). Such a method serves as a
    baseline, and only single requests can select it."""

    first: int = 4096
    last: int = 256
    layers: int = 2
    block: int = 128

    def __post_init__(self) -> None:
        for name, low in (("first", 0), ("last", 1), ("layers", 0), ("block", 1)):
            check_int(f"sparse prefill {self.name}, option {name}", getattr(self, name), low)

    def tile(self, group_size: int) -> int:
        """Return the tokens of a tile, which read the same blocks. group_size: query heads per KV head."""
        return -(-ROWS // group_size)

    @property
    def namespace(self) -> str:
        """Namespace of the prefix index; it covers everything that affects the KV."""
        return repr(self)

    @property
    def span(self) -> int:
        """Tokens with a common choice of blocks; 0: a tile."""
        return 0

    def check(self, facts: ModelFacts, block_size: int) -> None:
        """Check the method against a model. Raises: InvalidArgumentError if the model does not support it, or
        `block` is no multiple of the block size."""
        require(
            self.block % block_size == 0,
            f"sparse prefill {self.name} chooses among blocks of {self.block} tokens, which blocks of "
            f"{block_size} in the KV cache do not make up; pass a multiple, such as "
            f"{self.name}(block={-(-self.block // block_size) * block_size}).",
        )

    def sparse_rows(self, facts: LayerFacts, block_size: int) -> SparseRows:
        """Return the rows for the scheduler's plans; tiles are whole blocks of the KV cache."""
        tile = blocks_for(self.tile(facts.group_size), block_size) * block_size
        return SparseRows(tile, max(1, blocks_for(self.span, tile)) * tile, self.first, self.last)

    def reads_all(self, max_len: int) -> bool:
        """Return whether sequences of up to max_len tokens read every block, and so are computed densely."""
        return False

    @abstractmethod
    def choose(self, tiles: Tiles) -> Tensor:
        """Return a mask [n, K, N] of the blocks to read per tile and KV head. Invisible ones are ignored."""


def in_pieces(choose: Callable[[Tiles], Tensor], tiles: Tiles, elements: int) -> Tensor:
    """Call `choose` on a few tiles at a time. elements: elements in memory per tile."""
    step = max(1, MAX_ELEMENTS // max(1, elements))
    pieces = [choose(tiles.part(slice(at, at + step))) for at in range(0, len(tiles.lengths), step)]
    return torch.cat(pieces)


def nearest(tiles: Tiles, first: int, local: int) -> Tensor:
    """Return a mask [n, K, N] of the first blocks, and of the last ones before each tile."""
    blocks = torch.arange(tiles.num_blocks, device=tiles.past.device)
    return (blocks < first) | (blocks >= tiles.past[..., None] - local)


def check_share(what: str, value: object, low: float = 0.0, high: float = 1.0) -> None:
    """Raise InvalidArgumentError unless the value is a number from low to high."""
    require(
        isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high,
        f"{what} is {value!r}; pass a number from {low:g} to {high:g}.",
    )
