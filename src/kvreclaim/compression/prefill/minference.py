"""MInference's patterns that cost less to choose than they save."""

from __future__ import annotations

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
