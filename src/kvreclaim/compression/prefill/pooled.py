"""Sparse prefill by the attention of a tile's queries to each block's mean key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.checks import check_int
from kvreclaim.compression.prefill.method import SparsePrefill, Tiles, check_share, in_pieces, nearest


@dataclass(frozen=True)
class Pooled(SparsePrefill):
    """Scores a block for a tile of queries of all heads that share a KV head,

        E_b = sum over the rows r of exp(s_rb - M),  s_rb = q_r . mean(K_b) x scale,  M the tile's largest,

    and reads those with E_b >= alpha x the largest E_b, the first `sinks` and the last `local` blocks.
    `rows` query rows of a KV head make a tile. alpha = 0 reads everything, bit-identical to dense attention.
    No state is kept between chunks: means are of cached keys in any format.

    Paper: FlashPrefill-V2, arXiv 2608.19758, with alpha .18 for Llama-3.1-8B and .08 for Qwen2.5-7B; read
    through a table per KV head and tile, as CompactAttention (arXiv 2605.16839) does for whole chunks.
    """

    name = "pooled"

    alpha: float = 0.1
    rows: int = 128
    sinks: int = 2
    local: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(f"sparse prefill {self.name}, option alpha", self.alpha)
        for name, low in (("sinks", 0), ("local", 0), ("rows", 1)):
            check_int(f"sparse prefill {self.name}, option {name}", getattr(self, name), low)

    def tile(self, group_size: int) -> int:
        return max(1, self.rows // group_size)

    def reads_all(self, max_len: int) -> bool:
        return self.alpha == 0 or (self.sinks + self.local) * self.block >= max_len

    def choose(self, tiles: Tiles) -> Tensor:
        heads, rows = tiles.past.shape[1], tiles.queries.shape[1] * tiles.queries.shape[2]
        scores = in_pieces(self.scores, tiles, rows * tiles.num_blocks + heads)
        best = scores.amax(-1, keepdim=True)
        return (scores >= self.alpha * best) | nearest(tiles, self.sinks, self.local)

    def scores(self, tiles: Tiles) -> Tensor:
        """Return E_b, [n, K, N] fp32; 0 for invisible blocks."""
        queries = tiles.by_head()
        logits = tiles.scaled(queries.flatten(2, 3) @ tiles.means.mT)
        own = tiles.is_row[:, None, :, None].expand(*queries.shape[:4]).flatten(2, 3)
        seen = own[..., None] & tiles.visible[:, :, None]
        logits = logits.masked_fill_(~seen, -torch.inf)
        top = logits.amax((2, 3), keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        return (logits - top).exp_().sum(2)
