"""The logical positions of each head's tokens, for policies and tests that ask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.uneven import Heads
from kvreclaim.schedule.budget.compaction import Pass


@dataclass(frozen=True, slots=True, eq=False)
class HeadPositions:
    """left: [n] int32 of each layer and KV head, of what the last pass has left. computed: tokens computed
    when it was made; all later ones stand behind."""

    left: Heads
    computed: int

    def of(self, layer: int, head: int, computed: int) -> Tensor:
        """[T] int32 when so many tokens are computed."""
        left = self.left[layer][head]
        new = torch.arange(self.computed, computed, dtype=torch.int32, device=left.device)
        return torch.cat([left, new])

    def until(self, num_tokens: int) -> HeadPositions:
        """Leave the first num_tokens tokens; every head has those that go, the last ones."""
        behind = self.computed - num_tokens
        if behind <= 0:
            return self
        return HeadPositions([[slots[:-behind] for slots in rows] for rows in self.left], num_tokens)


@dataclass(slots=True)
class Positions:
    """Positions of all requests that passes have touched."""

    shape: tuple[int, int]
    device: torch.device
    known: dict[str, HeadPositions] = field(default_factory=dict)

    def of(self, request_id: str, first: bool, computed: int) -> HeadPositions | None:
        """Before a pass; None where earlier passes were not seen."""
        if first:
            layers, heads = self.shape
            nothing = torch.empty(0, dtype=torch.int32, device=self.device)
            return HeadPositions([[nothing] * heads for _ in range(layers)], 0)
        return self.known.get(request_id)

    def table(self, request_id: str, first: bool, computed: int) -> Tensor | None:
        """[L, K, T] int32 where all heads hold equally many; None where earlier passes were not seen."""
        found = self.of(request_id, first, computed)
        if found is None:
            return None
        layers, heads = self.shape
        return torch.stack(
            [torch.stack([found.of(n, h, computed) for h in range(heads)]) for n in range(layers)]
        )

    def keep(self, request_id: str, first: bool, computed: int, kept: Heads) -> None:
        """A pass has kept these slots of each head, ascending. Where earlier ones were not seen, nothing is
        noted."""
        before = self.of(request_id, first, computed)
        if before is not None:
            left = [
                [before.of(n, h, computed)[slots.to(self.device)] for h, slots in enumerate(rows)]
                for n, rows in enumerate(kept)
            ]
            self.known[request_id] = HeadPositions(left, computed)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are gone or start anew."""
        for request_id in request_ids:
            self.known.pop(request_id, None)


def as_heads(kept: Tensor, shape: tuple[int, int]) -> Heads:
    """kept [L | 1, K | 1, M] -> [M] of each layer and head."""
    return [list(rows) for rows in kept.expand(*shape, -1)]


def padded(heads: Heads) -> Tensor:
    """[L, K, most] int32 on the host, -1 behind the numbers of each head."""
    lengths = [[len(slots) for slots in rows] for rows in heads]
    found = torch.full((*np.array(lengths).shape, max(map(max, lengths))), -1, dtype=torch.int32)
    for n, rows in enumerate(heads):
        for h, slots in enumerate(rows):
            found[n, h, : len(slots)] = slots.cpu()
    return found


@dataclass(slots=True)
class PassTrace:
    """Which positions each pass kept, for tests. Costs a copy to the host per pass.

    positions: of the slots after each request's last pass
    passes:    (request, position of the next query, positions kept [L, K, most] int32, -1 behind those of a
               head that keeps fewer), in order
    """

    positions: Positions
    passes: list[tuple[str, int, Tensor]] = field(default_factory=list)

    def add(self, done: Pass[str], kept: Heads) -> None:
        """kept: slots of each head. A request whose first pass was not seen is left out."""
        self.positions.keep(done.seq_id, done.first, done.logical_len, kept)
        if done.seq_id in self.positions.known:
            self.passes.append(
                (done.seq_id, done.logical_len, padded(self.positions.known[done.seq_id].left))
            )

    def take(self) -> list[tuple[str, int, Tensor]]:
        """The passes since the last call."""
        passes, self.passes = self.passes, []
        return passes

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are gone or start anew."""
        self.positions.forget(request_ids)
