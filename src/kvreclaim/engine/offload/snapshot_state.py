"""Compressed prefixes: sequences that never run, and their state outside of the memory."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from kvreclaim.engine.extension import Extension
from kvreclaim.engine.offload.image import Image, Parking
from kvreclaim.engine.offload.moves import Moves
from kvreclaim.engine.offload.states import StateCopies
from kvreclaim.engine.request.compression_state import CompressionState
from kvreclaim.engine.request.request import Request, Sequence
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.schedule import Admitted, Pass, Scheduler, Status, StepPlan
from kvreclaim.schedule.snapshot_key import SnapshotKey

logger = logging.getLogger(__name__)


class SnapshotFiles(Protocol):
    """Snapshot files on disk (engine/offload/prefixes.py)."""

    def made(self, snapshot: Sequence) -> None: ...

    def used(self, snapshot: Sequence) -> bool: ...

    def invalidate(self, key: SnapshotKey) -> None: ...


class SnapshotStore(Extension):
    """The sequences that hold compressed prefixes.

    held: by id; parking, moves: where there is a host; files: where there is a disk
    states: of recurrent layers; None: the model has none
    """

    rank = 25

    def __init__(
        self,
        scheduler: Scheduler[Sequence],
        signals: Signals,
        new_id: Callable[[], int],
        parking: Parking | None,
        moves: Moves | None,
        states: StateCopies | None,
    ) -> None:
        self.scheduler, self.signals, self._new_id = scheduler, signals, new_id
        self.held: dict[int, Sequence] = {}
        self.parking, self.moves, self.states = parking, moves, states
        self.files: SnapshotFiles | None = None

    def keep_files(self, files: SnapshotFiles) -> None:
        """Compressed prefixes are kept on disk, too."""
        self.files = files

    def planned(self, plan: StepPlan) -> None:
        self.park(plan.parked)

    def admitted(self, seq: Sequence, begun: Admitted) -> None:
        """It begins as the fork of a compressed prefix."""
        if begun.snapshot is None:
            return
        self.begin(seq, begun.snapshot, begun.unparked)
        metrics = seq.request.metrics
        if self.used(begun.snapshot) and metrics.queue_s is None:
            metrics.num_disk_tokens = begun.num_hit

    def begun(self, plan: StepPlan) -> None:
        self.drop(plan.dropped)

    def compressed(self, seq: Sequence, done: Pass[int], kept: Tensor | HeadRows) -> None:
        if seq.snapshot_key is not None and done.logical_len == seq.footprint.compress_prompt_at:
            self.keep(seq, replace(seq.snapshot_key, has_past=seq.begun_with is not None))

    def processed(self, seq: Sequence) -> None:
        """Keep the compressed prompt, if the next turn may share no more than that."""
        if seq.num_computed == seq.footprint.keep_at:
            self._keep_left(seq)

    def ending(self, seq: Sequence) -> None:
        """Keep the compressed sequence for the next turn of its conversation. The snapshot of its prompt is
        then the next one to be evicted."""
        if self._keep_left(seq) and seq.lineage is not None and (at := seq.footprint.keep_at):
            self.scheduler.snapshots.give_way(seq.lineage.of_first(at))

    def _keep_left(self, seq: Sequence) -> bool:
        """Keep a compressed sequence, unless exact blocks serve the same requests. Returns: whether it
        replaces the snapshot that was kept before."""
        account = seq.account
        live, room = seq.num_computed - account.num_evicted, self.signals.room
        drops = seq.footprint.drops
        is_inexact = account.num_evicted if drops is None else seq.num_computed >= drops.at
        is_short = is_inexact and (not seq.footprint.bounded or live < seq.footprint.prompt_cap)
        is_scarce = room.limit is not None and 2 * room.used > room.limit  # those that run need the rest
        if seq.lineage is None or seq.status is not Status.RUNNING or not is_short or is_scarce:
            return False
        if not self.scheduler.snapshots.can_keep(seq):
            return False
        if seq.begun_with is not None and seq.begun_with.has_past:
            self.scheduler.snapshots.give_way(seq.begun_with)
        tokens = array("q", seq.token_ids[: seq.num_computed]).tobytes()
        self.keep(seq, replace(seq.lineage, tokens=tokens))
        return True

    def unmoved(self, plan: StepPlan) -> None:
        self.forget(plan.parked)
        self.forget([one.snapshot for one in plan.admitted if one.unparked and one.snapshot is not None])

    def invalidated(self, seq: Sequence) -> None:
        self.invalidate(seq.snapshot_key)
        self.invalidate(seq.begun_with)

    def keep(self, parent: Sequence, key: SnapshotKey) -> None:
        """Keep what compression has left of a sequence, for requests that begin so."""
        retention = parent.request.spec.retention
        seq = replace(
            parent,
            seq_id=self._new_id(),
            keep_s=max((kept.ttl_s for kept in retention if key.num_tokens <= kept.num_tokens), default=0.0),
            snapshot_key=key,
            lineage=None,
            token_ids=parent.token_ids[: parent.num_computed],
            state=parent.state.fork(),
            keys=None,
            gang=False,
            followers=[],
            awaits=None,
            row_cache=None,
            cell_cache=None,
            window_cache={},
            generator=None,
            detokenizer=None,
            rule=None,
            logprobs=[],
        )
        if self.scheduler.snapshots.keep(parent, seq):
            self.held[seq.seq_id] = seq
            self.signals.fork(parent.seq_id, seq.seq_id)
            if self.files is not None:
                self.files.made(seq)
        self._move_out()

    def _move_out(self) -> None:
        """Move snapshots that were parked for a new one to the host at once: before the next step a pass may
        take their blocks. One that does not arrive is forgotten."""
        parked = [seq.seq_id for seq in self.scheduler.snapshots.take_parked()]
        if not parked or self.moves is None:
            return
        try:
            self.park(parked)
            self.moves.out(self.scheduler.memory.offload.parking.pop_moves_out())
        except Exception:
            logger.exception("moving %d compressed prefixes to the host failed", len(parked))
            self.forget(parked)

    def of_key(self, key: SnapshotKey, state: CompressionState) -> Sequence:
        """Make a snapshot without a request, for a loaded image. It has no blocks yet."""
        tokens = key.token_ids
        spec = RequestSpec(prompt_token_ids=tokens, params=SamplingParams())
        request = Request(spec, None, max_len=len(tokens), seed=0)
        return Sequence(
            seq_id=self._new_id(),
            request_id=request.request_id,
            token_ids=tokens,
            num_prompt=len(tokens),
            max_len=len(tokens),
            request=request,
            state=state,
            snapshot_key=key,
            num_computed=len(tokens),
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of a snapshot's state of recurrent layers; 0: the model has none."""
        return 0 if self.states is None else self.states.num_bytes

    def with_state(self, seq_id: int, image: Image) -> Image:
        """The image of a snapshot with its state of recurrent layers."""
        if self.states is None:
            return image
        return replace(image, recurrent=self.states.of_snapshot(seq_id))

    def enter_state(self, seq_id: int, image: Image) -> None:
        """Fill the state of a snapshot that comes from elsewhere."""
        if self.states is not None:
            self.states.enter_snapshot(seq_id, image.recurrent)

    def begin(self, seq: Sequence, snapshot_id: int, unparked: bool) -> None:
        """A sequence begins as the fork of one."""
        snapshot = self.held[snapshot_id]
        if unparked and self.parking is not None:
            self.parking.resume(snapshot)
            if self.states is not None:
                self.states.resume(snapshot_id)
        seq.state = snapshot.state.fork()
        if (cells := seq.state.cells) is not None:  # all of it is the prompt now
            slots = cells.counts * seq.footprint.block_size
            seq.state.cells = replace(cells, prompt_slots=slots)
        self.signals.fork(snapshot.seq_id, seq.seq_id)

    def used(self, snapshot_id: int) -> bool:
        """Note that a sequence has begun with a snapshot. Returns: whether it came from disk for it."""
        return self.files is not None and self.files.used(self.held[snapshot_id])

    def park(self, seq_ids: Iterable[int]) -> None:
        """Their blocks go to the host in this step."""
        for seq_id in seq_ids:
            assert self.parking is not None, "only a memory with host slots parks anything"
            self.parking.park(self.held[seq_id])
            if self.states is not None:
                self.states.park(seq_id)

    def drop(self, seq_ids: Iterable[int]) -> None:
        """The memory has forgotten them."""
        for seq_id in seq_ids:
            del self.held[seq_id]
            self.signals.drop(seq_id)
            if self.parking is not None:
                self.parking.drop(seq_id)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Forget snapshots that may not have arrived."""
        for seq_id in seq_ids:
            if seq_id in self.held:
                self.scheduler.snapshots.drop(self.held[seq_id].snapshot_key)

    def invalidate(self, key: SnapshotKey | None) -> None:
        """Forget what is kept under a key, wherever: it may be wrong."""
        self.scheduler.snapshots.drop(key)
        if key is not None and self.files is not None:
            self.files.invalidate(key)
