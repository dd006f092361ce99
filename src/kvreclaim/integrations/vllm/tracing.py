"""Which positions each pass kept: what tests hold against a model that drops the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from kvreclaim.compression.uneven import Heads
from kvreclaim.integrations.vllm.cells.positions import Positions, padded
from kvreclaim.schedule.budget.compaction import Pass


@dataclass(slots=True)
class PassTrace:
    """Costs a copy to the host per pass.

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
