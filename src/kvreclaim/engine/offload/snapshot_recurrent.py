"""The states of recurrent layers that snapshots have, on the device and on the host."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvreclaim.engine.offload.image import Image
from kvreclaim.engine.offload.offloaded_states import OffloadedStates
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.offload import ParkingSlots
from kvreclaim.ops.states import StateStore


class NoSnapshotStates:
    """A model without recurrent layers has none. SnapshotStates overrides all of this."""

    num_bytes = 0
    """Bytes of a state."""

    def park(self, seq_id: int) -> None:
        """Its blocks go to the host in this step."""

    def resume(self, seq_id: int) -> None:
        """Its blocks come back in this step."""

    def with_state(self, seq_id: int, image: Image) -> Image:
        """The image of a snapshot with its state."""
        return image

    def enter(self, seq_id: int, image: Image) -> None:
        """Fill the state of a snapshot that comes from elsewhere, and lies on the device or the host."""


class SnapshotStates(NoSnapshotStates):
    """Moves them as their blocks are moved, and copies them to images.

    on_host: None where no states lie there, and so no snapshots
    """

    def __init__(
        self,
        group: RecurrentGroup,
        store: StateStore,
        parking: ParkingSlots,
        on_host: OffloadedStates | None,
    ) -> None:
        self.group, self.store, self.parking, self.on_host = group, store, parking, on_host
        self.num_bytes = store.num_bytes

    def _row(self, seq_id: int) -> Tensor:
        assert self.on_host is not None, "a snapshot is parked only with its state"
        return self.on_host.rows[self.parking.state_slot(seq_id)]

    def park(self, seq_id: int) -> None:
        if (slot := self.group.leaving(seq_id)) is not None:
            self.store.write_bytes(slot, self._row(seq_id))
            self.group.saved(seq_id)

    def resume(self, seq_id: int) -> None:
        if (slot := self.group.coming(seq_id)) is not None:
            self.store.read_bytes(slot, self._row(seq_id))
            self.group.loaded(seq_id)

    def with_state(self, seq_id: int, image: Image) -> Image:
        return replace(image, recurrent=self._copy(seq_id))

    def _copy(self, seq_id: int) -> Tensor:
        """[state_bytes] uint8: the state of a snapshot, wherever it lies."""
        if self.parking.is_parked(seq_id):
            return self._row(seq_id).clone()
        slot, row = self.group.slot(seq_id), torch.empty(self.num_bytes, dtype=torch.uint8)
        assert slot is not None, f"snapshot {seq_id} has no state"
        self.store.write_bytes(slot, row)
        return row

    def enter(self, seq_id: int, image: Image) -> None:
        row = image.recurrent
        assert row is not None, "image_from refuses one without"
        if self.parking.is_parked(seq_id):
            self._row(seq_id).copy_(row)
            return
        self.group.enter(seq_id, parked=False)
        slot = self.group.slot(seq_id)
        assert slot is not None, "it has just been given one"
        self.store.read_bytes(slot, row)
