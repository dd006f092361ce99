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
"""Query rows of a tile, all query heads of a KV head together, where a method says nothing else."""
MAX_ELEMENTS = 1 << 24
"""Logits of tiles that are held at once; more tiles are looked at in pieces."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Rows of one sequence in one layer that are decided on: n tiles of at most R consecutive tokens, and
    what lies before each. Blocks are those that are chosen from, B tokens each, counted from the sequence's
    first slot; `past` of them lie wholly before a tile, and what follows them is read anyway.

    layer:   of those that the cache holds
    positions: of each tile's first token in the text
    queries: [n, R, H, D]; rows beyond a tile's own are anything
    lengths: [n] int64 tokens of each tile
    ends:    [n, K] int64, slots up to the tile's last token, itself included
    past:    [n, K] int64
    block:   B
    softmax: how logits become weights; sinks are left out
    keys:    (first, stop) -> [K, stop - first, D] fp32: slots first .. stop - 1 of every head, as the cache
             holds them, beyond a head's length anything
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
        """N: the most that lie before any tile."""
        return int(self.past.max())

    @cached_property
    def visible(self) -> Tensor:
        """[n, K, N] bool: blocks that lie before the tile."""
        return torch.arange(self.num_blocks, device=self.past.device) < self.past[..., None]

    @cached_property
    def is_row(self) -> Tensor:
        """[n, R] bool: the tile's own rows."""
        return torch.arange(self.queries.shape[1], device=self.past.device) < self.lengths[:, None]

    @cached_property
    def means(self) -> Tensor:
        """[K, N, D] fp32: the mean key of each block."""
        step = max(1, MAX_ELEMENTS // (self.past.shape[1] * self.block * self.queries.shape[-1]))
        pieces = []
        for first in range(0, self.num_blocks, step):
            stop = min(first + step, self.num_blocks)
            keys = self.keys(first * self.block, stop * self.block)
            pieces.append(keys.unflatten(1, (stop - first, self.block)).mean(2))
        return torch.cat(pieces, 1)

    def by_head(self) -> Tensor:
        """[n, K, R, G, D] fp32 queries by the KV head that they read."""
        grouped = self.queries.float().unflatten(2, (self.past.shape[1], -1))
        return grouped.transpose(1, 2)

    def scaled(self, products: Tensor) -> Tensor:
        """q.k as logits."""
        logits, cap = products * self.softmax.scale, self.softmax.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def part(self, at: slice) -> Tiles:
        """Some of the tiles, over the same blocks."""
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
    """A method. A subclass says which blocks a tile's rows read beside the ones around them.

    first:  leading tokens of a prompt that attend to everything before them
    last:   tokens at its end that do so, too
    layers: leading layers whose tokens all do so
    block:  tokens that are read or not; a multiple of the KV cache's blocks
    """

    name: ClassVar[str]
    slow: ClassVar[bool] = False
    """Whether choosing takes about as long as what is left out (docs/prompts.md): there to be compared with,
    and asked for by single requests alone."""

    first: int = 4096
    last: int = 256
    layers: int = 2
    block: int = 128

    def __post_init__(self) -> None:
        for name, low in (("first", 0), ("last", 1), ("layers", 0), ("block", 1)):
            check_int(f"sparse prefill {self.name}, option {name}", getattr(self, name), low)

    def tile(self, group_size: int) -> int:
        """Tokens whose rows read the same blocks, where so many query heads share a KV head."""
        return -(-ROWS // group_size)

    @property
    def namespace(self) -> str:
        """Names all that what it computes depends on: prefixes are found under it alone."""
        return repr(self)

    @property
    def span(self) -> int:
        """Tokens that are decided on together; 0: a tile."""
        return 0

    def check(self, facts: ModelFacts, block_size: int) -> None:
        """Raise InvalidArgumentError if the method does not go with the model, or blocks of the KV cache do
        not make up its own."""
        require(
            self.block % block_size == 0,
            f"sparse prefill {self.name} chooses among blocks of {self.block} tokens, which blocks of "
            f"{block_size} in the KV cache do not make up; pass a multiple, such as "
            f"{self.name}(block={-(-self.block // block_size) * block_size}).",
        )

    def sparse_rows(self, facts: LayerFacts, block_size: int) -> SparseRows:
        """The rows that the scheduler plans by; tiles are whole blocks of the KV cache."""
        tile = blocks_for(self.tile(facts.group_size), block_size) * block_size
        return SparseRows(tile, max(1, blocks_for(self.span, tile)) * tile, self.first, self.last)

    def reads_all(self, max_len: int) -> bool:
        """Whether nothing is ever left out of a sequence of so many tokens at most: it is computed densely
        then, and is as exact."""
        return False

    @abstractmethod
    def choose(self, tiles: Tiles) -> Tensor:
        """[n, K, N] bool: the blocks that each tile reads for each KV head; what is not visible goes
        unread."""


def in_pieces(choose: Callable[[Tiles], Tensor], tiles: Tiles, elements: int) -> Tensor:
    """choose, a few tiles at a time. elements: numbers that one tile takes."""
    step = max(1, MAX_ELEMENTS // max(1, elements))
    pieces = [choose(tiles.part(slice(at, at + step))) for at in range(0, len(tiles.lengths), step)]
    return torch.cat(pieces)


def nearest(tiles: Tiles, first: int, local: int) -> Tensor:
    """[n, K, N] bool: the first blocks, and the last ones before each tile."""
    blocks = torch.arange(tiles.num_blocks, device=tiles.past.device)
    return (blocks < first) | (blocks >= tiles.past[..., None] - local)


def check_share(what: str, value: object, low: float = 0.0, high: float = 1.0) -> None:
    """Raise InvalidArgumentError unless it is a number within these."""
    require(
        isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high,
        f"{what} is {value!r}; pass a number from {low:g} to {high:g}.",
    )
