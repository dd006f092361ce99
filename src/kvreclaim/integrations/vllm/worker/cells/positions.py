"""The logical positions of each head's tokens, for policies and tests that need them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.head_rows import HeadRows, runs
from kvreclaim.schedule.budget.compaction import Pass


@dataclass(frozen=True, slots=True, eq=False)
class HeadPositions:
    """left: int32, positions of the tokens that the last pass left. computed: tokens computed by then; all
    later ones follow."""

    left: HeadRows
    computed: int

    def at(self, computed: int) -> HeadRows:
        """Return the positions when `computed` tokens are computed."""
        new = torch.arange(self.computed, computed, dtype=torch.int32, device=self.left.flat.device)
        return self.left.append(new, 0 * self.left.counts, 0 * self.left.counts + len(new))

    def until(self, num_tokens: int) -> HeadPositions:
        """Return the positions of the first num_tokens tokens. All heads have the later ones that are cut."""
        behind = self.computed - num_tokens
        if behind <= 0:
            return self
        counts = np.maximum(self.left.counts - behind, 0)
        index = runs(self.left.starts, counts, self.left.flat.device)
        return HeadPositions(HeadRows(self.left.flat.index_select(0, index), counts), num_tokens)


@dataclass(slots=True)
class Positions:
    """Positions of all requests that passes have touched."""

    shape: tuple[int, int]
    device: torch.device
    known: dict[str, HeadPositions] = field(default_factory=dict)

    def of(self, request_id: str, first: bool) -> HeadPositions | None:
        """Return the positions before a pass; None if earlier passes were not seen."""
        if first:
            return HeadPositions(HeadRows.empty(self.shape, torch.int32, self.device), 0)
        return self.known.get(request_id)

    def keep(self, request_id: str, first: bool, computed: int, kept: HeadRows) -> None:
        """Record the slots of each head that a pass kept, ascending. Nothing is recorded if earlier passes
        were not seen."""
        before = self.of(request_id, first)
        if before is not None:
            own = HeadRows(kept.flat.to(self.device), kept.counts)
            self.known[request_id] = HeadPositions(before.at(computed).take(own), computed)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or start anew."""
        for request_id in request_ids:
            self.known.pop(request_id, None)


def as_heads(kept: Tensor, shape: tuple[int, int]) -> HeadRows:
    """kept [L | 1, K | 1, M] -> M of each layer and head."""
    return HeadRows(kept.expand(*shape, -1).flatten(), np.full(shape, kept.shape[-1]))


def padded(heads: HeadRows) -> Tensor:
    """[L, K, most] int32 on the host, -1 behind the numbers of each head."""
    found = torch.full((*heads.counts.shape, int(heads.counts.max())), -1, dtype=torch.int32)
    found[torch.from_numpy(np.arange(found.shape[-1]) < heads.counts[..., None])] = heads.flat.cpu().int()
    return found


@dataclass(slots=True)
class PassTrace:
    """The positions that each pass kept, for tests. Costs a copy to the host per pass.

    positions: of the slots after each request's last pass
    passes:    (request, position of the next query, positions kept [L, K, most] int32, -1 behind those of a
               head that keeps fewer), in order
    """

    positions: Positions
    passes: list[tuple[str, int, Tensor]] = field(default_factory=list)

    def add(self, done: Pass[str], kept: HeadRows) -> None:
        """Record a pass. kept: slots of each head. Requests are skipped if their first pass was not seen."""
        self.positions.keep(done.seq_id, done.first, done.logical_len, kept)
        if done.seq_id in self.positions.known:
            self.passes.append(
                (done.seq_id, done.logical_len, padded(self.positions.known[done.seq_id].left))
            )

    def take(self) -> list[tuple[str, int, Tensor]]:
        """Return the passes since the last call."""
        passes, self.passes = self.passes, []
        return passes

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or start anew."""
        self.positions.forget(request_ids)
