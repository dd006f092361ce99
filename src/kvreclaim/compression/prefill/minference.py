"""MInference's three patterns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.checks import check_int
from kvreclaim.compression.prefill.method import SparsePrefill, Tiles, nearest
from kvreclaim.memory.blocks import blocks_for


def _check(method: SparsePrefill, *names: str, low: int = 0) -> None:
    for name in names:
        check_int(f"sparse prefill {method.name}, option {name}", getattr(method, name), low)


@dataclass(frozen=True)
class AShape(SparsePrefill):
    """Reads the first `sinks` and the last `local` tokens of every head, in whole blocks. Choosing is free.

    Paper: MInference, arXiv 2407.02490, section 3.2.
    """

    name = "a_shape"

    sinks: int = 128
    local: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "sinks", "local")

    def reads_all(self, max_len: int) -> bool:
        return self.sinks + self.local >= max_len

    def choose(self, tiles: Tiles) -> Tensor:
        return nearest(tiles, blocks_for(self.sinks, self.block), blocks_for(self.local, self.block))


@dataclass(frozen=True)
class BlockSparse(SparsePrefill):
    """Reads the `top` blocks of 64 tokens by the attention of a tile's mean query to a block's mean key,
    summed over the query heads of a KV head.

    Paper: MInference, arXiv 2407.02490, section 3.2, algorithm 3: top 100.
    """

    name = "block_sparse"

    block: int = 64
    top: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "top", low=1)

    def tile(self, group_size: int) -> int:
        return self.block

    def reads_all(self, max_len: int) -> bool:
        return self.top * self.block >= max_len

    def choose(self, tiles: Tiles) -> Tensor:
        own = tiles.is_row[:, None, :, None, None]
        queries = (tiles.by_head() * own).sum(2) / own.sum(2)  # [n, K, G, D]
        logits = tiles.scaled(queries @ tiles.means.mT).masked_fill(~tiles.visible[:, :, None], -torch.inf)
        lowest = torch.finfo(torch.float32).min
        weights = logits.clamp(min=lowest).softmax(-1).sum(2)
        kept = torch.zeros_like(tiles.visible)
        kept.scatter_(-1, weights.topk(min(self.top, tiles.num_blocks), -1).indices, value=True)
        return kept | nearest(tiles, 1, 1)


@dataclass(frozen=True)
class VerticalSlash(SparsePrefill):
    """Reads the columns and diagonals with most attention of the last `queries` of every `every` tokens:
    `vertical` tokens by their columns' sums, the first 30 always, and `slash` distances by their diagonals'
    sums, the last 100 always. The choice is by whole blocks, with sums over a block and over the query heads
    of a KV head.

    Paper: MInference, arXiv 2407.02490, algorithms 1 and 2, which use the prompt's last 64 queries. Here each
    span uses its own last queries, so that a prompt may be computed in chunks.
    """

    name = "vertical_slash"
    slow = True

    block: int = 16
    vertical: int = 1000
    slash: int = 6096
    queries: int = 64
    every: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "vertical", "slash")
        _check(self, "queries", "every", low=1)

    def tile(self, group_size: int) -> int:
        return 64

    @property
    def span(self) -> int:
        return self.every

    def reads_all(self, max_len: int) -> bool:
        return max(self.vertical, self.slash) >= max_len

    def choose(self, tiles: Tiles) -> Tensor:
        kept, keys = torch.zeros_like(tiles.visible), tiles.keys(0, int(tiles.ends.max()))
        for group in _spans(tiles.positions, self.span):
            part = tiles.part(group)
            columns, diagonals = self.sums(part, keys)
            kept[group] = self._columns(part, columns) | self._distances(part, diagonals)
        return kept

    def sums(self, tiles: Tiles, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention [K, C] fp32 of one span's last queries to every slot, and [K, C] to every
        distance. keys: [K, C or more, D]"""
        rows = tiles.is_row.flatten().nonzero()[-self.queries :, 0]
        queries = tiles.queries.flatten(0, 1)[rows].float()  # [q, H, D]
        heads, num_keys = tiles.past.shape[1], int(tiles.ends[-1].max())
        grouped = queries.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [K, G, q, D]
        slots = torch.arange(num_keys, device=keys.device)
        last = tiles.ends[-1][:, None] - len(rows) + torch.arange(len(rows), device=keys.device)  # [K, q]
        logits = tiles.scaled(grouped @ keys[:, None, :num_keys].mT)
        logits = logits.masked_fill_((slots > last[..., None])[:, None], -torch.inf)
        weights = logits.softmax(-1).sum(1)  # [K, q, C]
        return weights.sum(1), _diagonals(weights, tiles.ends[-1])

    def _columns(self, tiles: Tiles, sums: Tensor) -> Tensor:
        """Return a mask [n, K, N] of the vertical blocks."""
        num_slots = tiles.num_blocks * self.block  # may exceed the span
        known = torch.nn.functional.pad(sums, (0, max(0, num_slots - sums.shape[1])))[:, :num_slots]
        in_blocks = known.unflatten(1, (-1, self.block)).sum(-1)
        kept = _top(in_blocks, self.vertical // self.block, blocks_for(30, self.block))
        return kept.expand(len(tiles.lengths), -1, -1)

    def _distances(self, tiles: Tiles, sums: Tensor) -> Tensor:
        """Return a mask [n, K, N] of the slash blocks. A distance bin d covers [d x B, (d + 1) x B)."""
        missing = -sums.shape[1] % self.block
        in_bins = torch.nn.functional.pad(sums, (0, missing)).unflatten(1, (-1, self.block)).sum(-1)
        near = _top(in_bins, self.slash // self.block, blocks_for(100, self.block)).float()  # [K, bins]
        blocks = torch.arange(tiles.num_blocks, device=sums.device)
        low = (tiles.ends - tiles.lengths[:, None])[..., None] - (blocks + 1) * self.block
        high = tiles.ends[..., None] - 1 - blocks * self.block
        covered = torch.nn.functional.pad(near.cumsum(-1), (1, 0))  # [K, bins + 1]
        first = (low.clamp(min=0) // self.block).clamp(max=near.shape[1])
        stop = (high // self.block + 1).clamp(min=0, max=near.shape[1])
        expanded = covered.expand(len(tiles.lengths), -1, -1)
        return expanded.gather(-1, stop) > expanded.gather(-1, first)


def _spans(positions: tuple[int, ...], span: int) -> Iterator[slice]:
    """Yield runs of tiles with a common choice of blocks."""
    first = 0
    for at in range(1, len(positions) + 1):
        if at == len(positions) or positions[at] // span != positions[first] // span:
            yield slice(first, at)
            first = at


def _diagonals(weights: Tensor, ends: Tensor) -> Tensor:
    """Return the sums [K, C] fp32 of weights [K, q, C] at each distance between query and key. A head's last
    query is in slot ends - 1."""
    _, queries, columns = weights.shape
    wide = torch.nn.functional.pad(weights.flip(1), (0, queries)).flatten(1)[:, :-queries]
    sums = wide.unflatten(1, (queries, columns + queries - 1)).sum(1)  # [j]: key + the last query - query
    place = ends[:, None] - 1 - torch.arange(columns, device=ends.device)
    return sums.gather(1, place.clamp(min=0)).masked_fill(place < 0, 0)


def _top(scores: Tensor, count: int, first: int) -> Tensor:
    """Return a mask [K, N] of `count` entries: the `first` leading ones per row, and the highest others."""
    kept = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores) < first
    left = min(max(0, count - first), scores.shape[-1])
    order = scores.masked_fill(kept, -torch.inf).topk(left, -1).indices
    return kept.scatter(-1, order, value=True)
