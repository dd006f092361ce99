"""The pages of one sequence: their rows in the cold pool, their tokens, and the recalled ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvreclaim.compression.recall.digest import Digests


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """Evicted tokens that fill no page: not recalled. rows: [L, K] of the cold pool, tokens in the first n
    slots of each unit; positions: [L, K, n] int32 on the host."""

    rows: Tensor
    positions: Tensor


@dataclass(slots=True, eq=False)
class PageTable:
    """P pages of S tokens per (layer, KV head). All heads have equally many. Tensors are replaced, never
    written in place, so forks share them.

    rows:      [L, K, P] int64 on the host, of the cold pool
    positions: [L, K, P, S] int32 on the host, logical positions of their tokens
    digests:   of [L, K, P] pages, on the device
    benefit:   [L, K, P] fp32 on the device, as last computed
    tries:     [L, K, P] int32 on the device: recalls of the page after which the pass kept none of its tokens
    hot:       [L, K, R] int64 on the device: the page in each recall block
    waiting:   None where no token waits
    dropped:   pages per head that were dropped for lack of cold memory
    """

    rows: Tensor
    positions: Tensor
    digests: Digests
    benefit: Tensor
    tries: Tensor
    hot: Tensor
    waiting: Waiting | None = None
    dropped: int = 0

    @classmethod
    def empty(
        cls, heads: tuple[int, int], blocks: int, size: int, dim: int, device: torch.device
    ) -> PageTable:
        """Return an empty table of L layers and K KV heads. The first pass chooses recalled pages."""
        codes = torch.zeros((*heads, 0, 2, dim), dtype=torch.int8, device=device)
        numbers = torch.zeros((*heads, 0), device=device)
        return cls(
            torch.zeros((*heads, 0), dtype=torch.int64),
            torch.zeros((*heads, 0, size), dtype=torch.int32),
            Digests(codes, numbers, numbers),
            numbers,
            numbers.int(),
            torch.zeros((*heads, blocks), dtype=torch.int64, device=device),
        )

    @property
    def num_pages(self) -> int:
        """P."""
        return self.rows.shape[-1]

    @property
    def held(self) -> Tensor:
        """All its rows of the cold pool, flat."""
        rows = self.rows.flatten()
        return rows if self.waiting is None else torch.cat([rows, self.waiting.rows.flatten()])

    @property
    def hot_positions(self) -> Tensor:
        """[L, K, R * S] int32 on the host, of the recalled tokens."""
        found = self.positions.take_along_dim(self.hot.cpu()[..., None], 2)
        return found.flatten(2)

    def broken_rows(self, broken: Tensor) -> Tensor:
        """Return the rows to free: those of recalled pages that lost tokens to the survivors, broken
        [L, K, R], and those of waiting tokens."""
        waiting = [] if self.waiting is None else [self.waiting.rows.flatten()]
        if not self.num_pages:
            return torch.cat([self.rows.flatten(), *waiting])
        return torch.cat([self.rows.take_along_dim(self.hot.cpu(), -1)[broken.cpu()], *waiting])

    def fork(self) -> PageTable:
        """Return a copy of the table for a child."""
        return replace(self)

    def grown(self, num_pages: int) -> PageTable:
        """Return a table with room for num_pages pages, in tensors of its own. New pages are unwritten."""
        more = num_pages - self.num_pages

        def wider(x: Tensor, dim: int = 2) -> Tensor:
            shape = list(x.shape)
            shape[dim] = more
            return torch.cat([x, x.new_zeros(shape)], dim)

        digests = Digests(wider(self.digests.codes), wider(self.digests.scale), wider(self.digests.value))
        return replace(
            self,
            rows=wider(self.rows),
            positions=wider(self.positions),
            digests=digests,
            benefit=wider(self.benefit),
            tries=wider(self.tries),
        )

    def without(self, kept: Tensor) -> PageTable:
        """Return a table of pages kept [L, K, P'] int64 on the device, which include the recalled ones."""
        here = kept.cpu()
        digests = Digests(
            self.digests.codes.take_along_dim(kept[..., None, None], 2),
            self.digests.scale.take_along_dim(kept, 2),
            self.digests.value.take_along_dim(kept, 2),
        )
        place = torch.full(self.benefit.shape, -1, dtype=torch.int64, device=kept.device)
        place.scatter_(2, kept, torch.arange(kept.shape[-1], device=kept.device).expand_as(kept))
        return replace(
            self,
            rows=self.rows.take_along_dim(here, 2),
            positions=self.positions.take_along_dim(here[..., None], 2),
            digests=digests,
            benefit=self.benefit.take_along_dim(kept, 2),
            tries=self.tries.take_along_dim(kept, 2),
            hot=place.take_along_dim(self.hot, 2),
            dropped=self.dropped + self.num_pages - kept.shape[-1],
        )
