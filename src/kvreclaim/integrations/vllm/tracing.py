"""Which positions each pass kept: what tests hold against a model that drops the same tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvreclaim.schedule.step import Pass


@dataclass(slots=True)
class Trace:
    """Costs a copy to the host per pass.

    live:   request -> [L, K, live] int32, position of each slot after its last pass
    passes: (request, position of the next query, positions kept [L, K, keep] int32), in order
    """

    live: dict[str, Tensor] = field(default_factory=dict)
    passes: list[tuple[str, int, Tensor]] = field(default_factory=list)

    def add(self, done: Pass[str], kept: Tensor, num_layers: int, num_kv_heads: int) -> None:
        """kept: [L | 1, K | 1, keep]. A request whose first pass was not seen is left out."""
        old = self.live.get(done.seq_id)
        if old is None and not done.first:
            return
        slots = torch.arange(done.logical_len, dtype=torch.int32).expand(num_layers, num_kv_heads, -1)
        if old is not None:
            num_new = done.num_tokens - old.shape[-1]
            slots = torch.cat([old, slots[..., done.logical_len - num_new :]], dim=-1)
        assert slots.shape[-1] == done.num_tokens, f"{done}: {slots.shape[-1]} slots traced"
        positions = slots.take_along_dim(kept.cpu().expand(num_layers, num_kv_heads, -1), -1)
        self.live[done.seq_id] = positions
        self.passes.append((done.seq_id, done.logical_len, positions))

    def take(self) -> list[tuple[str, int, Tensor]]:
        """The passes since the last call."""
        passes, self.passes = self.passes, []
        return passes

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are gone or start anew."""
        for request_id in request_ids:
            self.live.pop(request_id, None)
