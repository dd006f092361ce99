"""Copies of recurrent layers' states: to and from the host, for snapshots and for session files."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor

from kvreclaim.checks import require
from kvreclaim.engine.extension import Extension, HitLostError
from kvreclaim.engine.request.request import Sequence
from kvreclaim.free_memory import free_host_memory_bytes
from kvreclaim.memory.groups.full import BlockTables
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.offload import ParkingSlots
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.offload.plan.states import HostStates
from kvreclaim.offload.store.session_file import SessionFile
from kvreclaim.ops.states import StateStore
from kvreclaim.schedule.step import Admitted

NAME = "state"
"""The tensor of a session file."""
logger = logging.getLogger(__name__)


class OffloadedStates(Extension):
    """Copies states between the device and the host, for prefixes that lie there. At return all bytes have
    arrived. A copy that fails costs a prefix hit.

    rows: [num_slots, state_bytes] uint8 in host memory

    Raises: InvalidArgumentError if there is not enough memory.
    """

    rank = 6

    def __init__(
        self, tables: BlockTables, group: RecurrentGroup, below: HostStates, store: StateStore
    ) -> None:
        self.tables, self.group, self.below, self.store = tables, group, below, store
        num_slots = below.slots.num_slots
        num_bytes, free = num_slots * store.num_bytes, free_host_memory_bytes()
        require(
            num_bytes <= free,
            f"{num_slots} states of recurrent layers take {num_bytes / 2**30:.2f} GiB of host memory, "
            f"but only {free / 2**30:.2f} GiB are free; lower kv_offloading_size or "
            "kv_offloading_state_fraction.",
            "kv_offloading_size",
        )
        on_gpu = store.device.type == "cuda"
        self.rows = torch.empty((num_slots, store.num_bytes), dtype=torch.uint8, pin_memory=on_gpu)

    def begin_step(self) -> None:
        self.flush()

    def computed(self, sequences: list[Sequence]) -> None:
        self.flush()

    def flush(self) -> None:
        """Copy new states to the host, while their slots are unchanged."""
        moves = self.below.pop_stores()
        try:
            for slot, target in moves:
                self.store.write_bytes(slot, self.rows[target])
        except Exception:
            logger.exception("storing states on the host failed; later requests compute them again")
            self.below.unstored([target for _, target in moves])

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, without a copy."""
        row: Any = self.rows[slot].numpy()
        return memoryview(row)

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
        return f"{self.below.slots.num_slots} states for prefixes on the host"


class StateCopies:
    """Moves the states of snapshots with their blocks, and copies states for images and session files.

    on_host: None if no states lie there, so no snapshots are parked
    """

    def __init__(
        self, group: RecurrentGroup, store: StateStore, parking: ParkingSlots, on_host: OffloadedStates | None
    ) -> None:
        self.group, self.store, self.parking, self.on_host = group, store, parking, on_host
        self.num_bytes = store.num_bytes

    def _device_row(self, slot: int | None) -> Tensor:
        row = torch.empty(self.num_bytes, dtype=torch.uint8)
        assert slot is not None, "a snapshot has a state, and a match ends at one"
        self.store.write_bytes(slot, row)
        return row

    # Snapshots.

    def _host_row(self, seq_id: int) -> Tensor:
        assert self.on_host is not None, "a snapshot is parked only with its state"
        return self.on_host.rows[self.parking.state_slot(seq_id)]

    def park(self, seq_id: int) -> None:
        """Move a snapshot's state to the host, in the step in which its blocks are moved."""
        if (slot := self.group.leaving(seq_id)) is not None:
            self.store.write_bytes(slot, self._host_row(seq_id))
            self.group.saved(seq_id)

    def resume(self, seq_id: int) -> None:
        """Move a snapshot's state to the device, in the step in which its blocks are moved."""
        if (slot := self.group.coming(seq_id)) is not None:
            self.store.read_bytes(slot, self._host_row(seq_id))
            self.group.loaded(seq_id)

    def of_snapshot(self, seq_id: int) -> Tensor:
        """[state_bytes] uint8: a copy of a snapshot's state, on the device or the host."""
        if self.parking.is_parked(seq_id):
            return self._host_row(seq_id).clone()
        return self._device_row(self.group.slot(seq_id))

    def enter_snapshot(self, seq_id: int, row: Tensor | None) -> None:
        """Fill the state of a snapshot that comes from elsewhere, and lies on the device or the host."""
        assert row is not None, "image_from refuses one without"
        if self.parking.is_parked(seq_id):
            self._host_row(seq_id).copy_(row)
            return
        self.group.enter(seq_id, parked=False)
        slot = self.group.slot(seq_id)
        assert slot is not None, "it has just been given one"
        self.store.read_bytes(slot, row)

    # Session files.

    def of_match(self, match: PrefixMatch) -> Tensor:
        """[state_bytes] uint8: a copy of the state behind a match that is not empty."""
        if match.state is None:
            return self._device_row(self.group.checkpoint(match.entries[-1]))
        assert self.on_host is not None, "the match names a state on the host"
        slot = self.on_host.below.slots.find(match.state)
        assert slot is not None, "the match names a state that is kept"
        return self.on_host.rows[slot].clone()

    def check(self, file: SessionFile, path: str | os.PathLike[str]) -> Tensor:
        """The state in a file. Raises: InvalidArgumentError if it has none, or no checkpoints are kept."""
        require(
            self.group.sizes.num_checkpoints > 0,
            "a session of a model with recurrent layers is kept as a checkpoint, but state_checkpoints is 0; "
            "raise it.",
            "state_checkpoints",
        )
        row = file.tensors.get(NAME)
        fits = row is not None and row.dtype == torch.uint8 and tuple(row.shape) == (self.num_bytes,)
        require(fits, f"{os.fspath(path)} holds no state of this model; save it again.", "filename")
        assert row is not None, "checked above"
        return row

    def enter(self, seq_id: int, row: Tensor) -> None:
        """Fill the state that a sequence's next commit keeps."""
        self.store.read_bytes(self.group.pending(seq_id)[0], row)
