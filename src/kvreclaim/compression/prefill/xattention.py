"""XAttention: blocks by the sums of their antidiagonals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.checks import check_int, require
from kvreclaim.compression.prefill.method import SparsePrefill, Tiles, check_share, in_pieces, nearest


@dataclass(frozen=True)
class XAttention(SparsePrefill):
    """Estimates a block's share of the attention from every stride-th antidiagonal of its logits: s keys in a
    row meet s queries in reverse, at a cost of 1/s of all logits. The blocks with the largest shares that
    make up `threshold` together are read, per query head; a KV head reads what any of its query heads does.

    Paper: XAttention, arXiv 2503.16428.
    """

    name = "xattention"
    slow = True

    stride: int = 16
    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("sparse prefill xattention, option stride", self.stride, 1)
        check_share("sparse prefill xattention, option threshold", self.threshold)
        require(
            self.block % self.stride == 0,
            f"sparse prefill xattention has stride {self.stride}, which does not divide its blocks of "
            f"{self.block} tokens; pass one that does, such as 8 or 16.",
        )

    def tile(self, group_size: int) -> int:
        return self.block

    def reads_all(self, max_len: int) -> bool:
        return self.threshold == 1

    def choose(self, tiles: Tiles) -> Tensor:
        num_keys = int(tiles.ends.max())
        groups = -(-tiles.queries.shape[1] // self.stride) * tiles.queries.shape[2]
        keys = self._strided_keys(tiles, num_keys)
        found = in_pieces(lambda part: self._kept(part, keys), tiles, groups * keys.shape[1])
        return found | nearest(tiles, 1, 1)

    def reversed(self, queries: Tensor) -> Tensor:
        """[..., R / s, s x D] of queries [..., R, D]: s in a row, the last one first, so that their products
        with s keys in a row are sums of antidiagonals."""
        padded = torch.nn.functional.pad(queries, (0, 0, 0, -queries.shape[-2] % self.stride))
        return padded.unflatten(-2, (-1, self.stride)).flip(-2).flatten(-2)

    def _strided_keys(self, tiles: Tiles, num_keys: int) -> Tensor:
        """[K, C, s x D]: the keys, s at a time, a block beyond the last one filled with zeros."""
        whole = tiles.keys(0, num_keys)
        missing = -num_keys % self.block
        return torch.nn.functional.pad(whole, (0, 0, 0, missing)).unflatten(1, (-1, self.stride)).flatten(2)

    def _kept(self, tiles: Tiles, keys: Tensor) -> Tensor:
        shares = self.shares(tiles, keys)  # [n, K, G, N + 1], the last one of what is read anyway
        order = shares[..., :-1].sort(-1, descending=True)
        before = order.values.cumsum(-1) - order.values + shares[..., -1:]
        kept = torch.zeros_like(shares[..., :-1], dtype=torch.bool)
        kept.scatter_(-1, order.indices, before < self.threshold)
        return kept.any(2)

    def shares(self, tiles: Tiles, keys: Tensor) -> Tensor:
        """[n, K, G, N + 1] fp32: estimated shares of the attention of each query head that the blocks before
        a tile have, and behind them the tile's own surroundings."""
        s, queries = self.stride, tiles.by_head().transpose(2, 3)  # [n, K, G, R, D]
        queries = queries * tiles.is_row[:, None, None, :, None]
        strided = self.reversed(queries)
        logits = tiles.scaled(strided.flatten(2, 3) @ keys.mT / s).unflatten(2, strided.shape[2:4])
        columns = torch.arange(keys.shape[1], device=keys.device) * s
        starts = tiles.ends - tiles.lengths[:, None]
        rows = torch.arange(strided.shape[3], device=keys.device) * s
        last = starts[..., None] + rows + s - 1
        seen = columns <= last[..., None]  # [n, K, R / s, C]
        own = rows < tiles.lengths[:, None]
        logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
        weights = logits.softmax(-1) * own[:, None, None, :, None]
        sums = weights.sum(3).unflatten(-1, (-1, self.block // s)).sum(-1)
        sums = sums / own.sum(-1)[:, None, None, None]
        blocks = sums[..., : tiles.num_blocks] * tiles.visible[:, :, None]
        return torch.cat([blocks, 1 - blocks.sum(-1, keepdim=True)], -1)
