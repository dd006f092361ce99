"""Compressed prefixes between the engine and their files on disk."""

from __future__ import annotations

import logging
import time
import weakref
from functools import partial

import torch

from kvreclaim.config import EngineConfig
from kvreclaim.engine.offload.disk import CLOSE_S, share_bytes, size_bytes
from kvreclaim.engine.offload.image import Image, Parking, image_of
from kvreclaim.engine.offload.image_record import UnfitError, image_from, key_facts, record_of
from kvreclaim.engine.offload.moves import Moves
from kvreclaim.engine.offload.snapshot_state import SnapshotStore
from kvreclaim.engine.offload.stats import PrefixStats
from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.request.sizing import load_wait, prefix_worth
from kvreclaim.offload.store.jobs import JobOutcome
from kvreclaim.offload.store.namespace import Namespace
from kvreclaim.offload.store.prefix_files import PrefixFiles
from kvreclaim.offload.store.prefix_workers import Loaded, PrefixWorkers, Stored
from kvreclaim.offload.store.session_file import SessionFile
from kvreclaim.schedule.disk_prefixes import DiskPrefixIndex
from kvreclaim.schedule.snapshot_key import SnapshotKey

logger = logging.getLogger(__name__)

TOUCH_S = 60.0
"""Least time between two notes that a file's content is used on the device."""


class Prefixes:
    """Writes snapshots through to files, and brings them to the host when a request needs them. close: at
    the latest when the object goes or the process ends.

    store_after: uses before a snapshot is written, 1 for at once
    """

    def __init__(
        self,
        store: SnapshotStore,
        parking: Parking,
        moves: Moves,
        files: PrefixFiles,
        below: DiskPrefixIndex[Sequence],
        store_after: int = 1,
    ) -> None:
        self.store, self.memory, self.signals = store, parking.memory, store.signals
        self.parking, self.slots, self.cache = parking, moves.slots, parking.cache
        self.files, self.below, self.store_after = files, below, store_after
        found = files.scan()
        self.below.know(found.items())
        self.num_recovered, self.num_hits, self.num_unfit = len(found), 0, 0
        self.workers = PrefixWorkers(files)
        self._reading: dict[str, SnapshotKey] = {}
        self._storing: set[str] = set()
        self._touched: dict[str, float] = {}
        self._fresh: set[int] = set()
        self._due: list[Sequence] = []
        self.close = weakref.finalize(self, self.workers.close, CLOSE_S)

    def stats(self) -> PrefixStats:
        return PrefixStats(
            counters=self.workers.counters,
            files=self.below.num_files,
            num_bytes=self.below.num_bytes,
            recovered=self.num_recovered,
            hits=self.num_hits,
            unfit=self.num_unfit,
            loading=self.below.num_coming,
            storing=len(self._storing),
        )

    @property
    def is_busy(self) -> bool:
        """Whether reads or writes of the disk are pending."""
        return bool(self._storing or self._reading)

    def made(self, snapshot: Sequence) -> None:
        """Handle a new snapshot, which is on the device."""
        if self.store_after <= 1:
            self._store(snapshot)

    def used(self, snapshot: Sequence) -> bool:
        """Note that a request begins with a snapshot. Returns: whether it was read from disk for it."""
        assert snapshot.snapshot_key is not None, "it is found by its key"
        key, now = snapshot.snapshot_key, time.monotonic()
        is_fresh = snapshot.seq_id in self._fresh
        self._fresh.discard(snapshot.seq_id)
        self.num_hits += is_fresh
        if key not in self.below:
            self._due.append(snapshot)
        elif now - self._touched.get(key.name, -TOUCH_S) >= TOUCH_S:
            self._touched[key.name] = now
            self.workers.touch(key.name)
        return is_fresh

    def flush(self) -> None:
        """Store the snapshots that were used in this step and are not on disk. They are on the device."""
        due, self._due = self._due, []
        for snapshot in due:
            seq_id = snapshot.seq_id
            if seq_id in self.store.held and not self.memory.offload.parking.is_parked(seq_id):
                self._store(snapshot)

    def _store(self, snapshot: Sequence) -> None:
        """Copy a snapshot to the host, and let a thread write it. After a failure it stays on the device."""
        key = snapshot.snapshot_key
        if key is None or not key.is_lasting or key in self.below or key.name in self._storing:
            return
        if not self.workers.takes_stores():
            return
        try:
            image = image_of(snapshot, self.memory, self.cache, self.signals)
            facts, tensors = record_of(self.store.with_state(snapshot.seq_id, image), key, self.cache)
        except Exception:
            logger.exception("a compressed prefix could not be copied to the host; it is not stored")
            return
        self._storing.add(key.name)
        self.workers.store(key.name, SessionFile(self.files.namespace.fields, facts, tensors))

    def submit(self) -> None:
        """Read the files that waiting requests need."""
        for key in self.below.take_wanted():
            self._reading[key.name] = key
            self.workers.load(key.name, partial(is_file_of, key))

    def poll(self) -> None:
        """Handle finished reads and writes without waiting."""
        for done in self.workers.poll():
            if isinstance(done, Stored):
                self._storing.discard(done.name)
                self.below.forget(done.gone)
                if done.outcome is JobOutcome.OK:
                    self.below.know([(done.name, done.num_bytes)])
            else:
                self._take(done)

    def _take(self, done: Loaded) -> None:
        key = self._reading.pop(done.name)
        is_needed = self.below.arrived(key)
        if done.is_gone:
            self.below.forget([done.name])
        if done.file is None or not is_needed:
            return
        try:
            self._enter(
                key, image_from(done.file.facts, done.file.tensors, self.cache, self.store.state_bytes)
            )
        except UnfitError as error:
            logger.warning("a compressed prefix on disk is of no use: %s", error)
            self._remove(key)
            self.num_unfit += 1

    def _enter(self, key: SnapshotKey, image: Image) -> None:
        """Keep an image on the host as the snapshot of this key, if there is room."""
        seq = self.store.of_key(key, image.state)
        seq.keys, seq.account = self.memory.keys(seq.token_ids, key.salt), image.account
        slots = self.store.scheduler.snapshots.enter(seq, image.table(seq.keys))
        if slots is None:
            return
        self.slots.fill([slot for slot in slots if slot is not None], image.blocks, image.beside)
        self.parking.enter(seq.seq_id, image.aside)
        self.store.enter_state(seq.seq_id, image)
        self.store.held[seq.seq_id] = seq
        self._fresh.add(seq.seq_id)

    def invalidate(self, key: SnapshotKey) -> None:
        """Remove a key's file, which may be wrong."""
        if key in self.below or key.name in self._storing:
            self._remove(key)

    def _remove(self, key: SnapshotKey) -> None:
        self.below.forget([key.name])
        self.workers.remove(key.name)

    def reset(self) -> None:
        """Forget all files, and delete them in the background."""
        self.below.clear()
        self._touched.clear()
        self.workers.clear()


def make_prefixes(
    config: EngineConfig, store: SnapshotStore, parking: Parking, moves: Moves, namespace: Namespace
) -> Prefixes:
    """Make the prefixes of an engine with a disk below its host slots."""
    assert config.kv_offloading_disk_path is not None, "there is a file"
    files = PrefixFiles(config.kv_offloading_disk_path, namespace, size_bytes(config), share_bytes(config))
    worth = prefix_worth(config, moves.rates)
    below: DiskPrefixIndex[Sequence] = DiskPrefixIndex(load_wait(config), worth, time.monotonic)
    store.scheduler.snapshots.look_below(below)
    store_after = 2 if config.kv_offloading_disk_write_policy == "write_through_selective" else 1
    return Prefixes(store, parking, moves, files, below, store_after)


def is_file_of(key: SnapshotKey, file: SessionFile) -> bool:
    """Return whether a file has all fields and tokens of the key."""
    tokens = file.tensors.get("tokens")
    if tokens is None or tokens.dtype != torch.int64 or tokens.numpy().tobytes() != key.tokens:
        return False
    return all(file.facts.get(name) == value for name, value in key_facts(key).items())
