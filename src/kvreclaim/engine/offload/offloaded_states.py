"""Copies states of recurrent layers between their slots and the host, for prefixes that lie there."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from kvreclaim.checks import require
from kvreclaim.engine.extension import Extension, HitLostError
from kvreclaim.engine.request.request import Sequence
from kvreclaim.free_memory import free_host_memory_bytes
from kvreclaim.memory.groups.full import BlockTables
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.prefix.index import Entry
from kvreclaim.memory.tiers.host_states import HostStates
from kvreclaim.ops.states import StateStore
from kvreclaim.schedule.step import Admitted

logger = logging.getLogger(__name__)


class OffloadedStates(Extension):
    """At once: at return all bytes have arrived. A copy that fails costs a prefix hit.

    rows: [num_slots, state_bytes] uint8 in host memory

    Raises: InvalidArgumentError if the memory is not there.
    """

    rank = 6

    def __init__(
        self, tables: BlockTables, group: RecurrentGroup, below: HostStates, store: StateStore
    ) -> None:
        self.tables, self.group, self.below, self.store = tables, group, below, store
        num_bytes, free = below.num_slots * store.num_bytes, free_host_memory_bytes()
        require(
            num_bytes <= free,
            f"{below.num_slots} states of recurrent layers take {num_bytes / 2**30:.2f} GiB of host memory, "
            f"but only {free / 2**30:.2f} GiB are free; lower kv_offloading_size or "
            "kv_offloading_state_fraction.",
            "kv_offloading_size",
        )
        on_gpu = store.device.type == "cuda"
        self.rows = torch.empty((below.num_slots, store.num_bytes), dtype=torch.uint8, pin_memory=on_gpu)

    def begin_step(self) -> None:
        self.flush()

    def computed(self, sequences: list[Sequence]) -> None:
        self.flush()

    def flush(self) -> None:
        """States that are new, and whose slots nobody has written since."""
        moves = self.below.pop_stores()
        try:
            for slot, target in moves:
                self.store.write_bytes(slot, self.rows[target])
        except Exception:
            logger.exception("storing states on the host failed; who wants them computes them again")
            self.below.unstored([target for _, target in moves])

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot themselves."""
        row: Any = self.rows[slot].numpy()
        return memoryview(row)

    def row(self, entry: Entry) -> Tensor:
        """A copy of the state behind a block of the host."""
        return self.rows[self.below.slot(entry)].clone()

    def admitted(self, seq: Sequence, begun: Admitted) -> None:
        if not self.below.is_coming(seq.seq_id):
            return
        source, slot = self.below.source(seq.seq_id), self.group.slot(seq.seq_id)
        try:
            assert source is not None, "it could not be loaded for another request before"
            assert slot is not None, f"sequence {seq.seq_id} has no slot for the state that it begins with"
            self.store.read_bytes(slot, self.rows[source])
        except Exception as error:
            self.below.unloaded(seq.seq_id)
            raise HitLostError("a state of recurrent layers could not be loaded from the host") from error
        self.below.loaded(seq.seq_id, self.tables[seq.seq_id])

    def describe(self) -> str:
        return f"{self.below.num_slots} states for prefixes on the host"
