"""Compressed prefixes: the result of a pass over a prompt's beginning, kept for other requests.

A snapshot is a sequence that never runs. It shares the blocks of its origin, and requests that start with it
are its forks. Neither it nor its continuations are in the prefix index.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.schedule.disk_prefixes import DiskPrefixIndex
from kvreclaim.schedule.queue import Seq, Tenant
from kvreclaim.schedule.snapshot_key import SnapshotKey


class Snapshots(Generic[Seq]):
    """Snapshots by key, least recently used first. A key contains everything that the content depends on,
    including the tokens, so keys are compared; the last hash of a key's chain only finds it.

    If blocks are lacking, or the limit of idle blocks is reached, a snapshot goes to the host, if the memory
    has slots for it and its recurrent state, or is dropped. Order: superseded by a later turn (`give_way`);
    of a tenant above an equal part, so that many small ones do not displace another tenant's; past `keep_s`;
    the least important; of the tenant that holds most; the least recently used. One that lies on disk is
    loaded to the host first.

    Args:
        max_blocks: limit of all together; 0: none is kept
        clock:      seconds, monotonic; for snapshots kept for a time

    below: those on disk; None without
    has_changed: there are changes to take
    """

    def __init__(
        self, memory: MemoryManager, max_blocks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.memory, self._parking = memory, memory.offload.parking
        self.max_blocks, self.clock = max_blocks, clock
        self.num_hits = 0
        self.below: DiskPrefixIndex[Seq] | None = None
        self.has_changed = False
        self._held: dict[SnapshotKey, Seq] = {}
        self._by_link: dict[int, list[SnapshotKey]] = {}
        self._sizes: dict[int, int] = {}
        """Blocks of those on the device, by sequence id."""
        self._useless: set[int] = set()
        self._kept_until: dict[int, float] = {}
        self._gone: list[Seq] = []
        self._parked: list[Seq] = []
        self._used: list[Seq] = []

    def look_below(self, below: DiskPrefixIndex[Seq]) -> None:
        """Also look for snapshots on disk."""
        self.below = below

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._held.values())

    @property
    def num_blocks(self) -> int:
        """Blocks that the snapshots hold, shared ones included."""
        return sum(self._sizes.values())

    def is_parked(self, seq: Seq) -> bool:
        return self._parking.is_parked(seq.seq_id)

    def get(self, key: SnapshotKey | None) -> Seq | None:
        """Return the snapshot of this key, on the device or the host."""
        return None if key is None else self._held.get(key)

    def find(self, seq: Seq) -> Seq | None:
        """Return the longest snapshot with which a waiting sequence could start."""
        most = seq.max_prefix_hit
        held = (
            one
            for one in self._of(seq)
            if (most is None or one.num_computed <= most)
            and (seq.footprint.drops is None or seq.can_drop_behind(one))
        )
        return next((one for one in held if one not in self._parked), None)

    def _of(self, seq: Seq) -> Iterator[Seq]:
        """Snapshots of a sequence's first tokens, the longest first."""
        if seq.lineage is None:
            if (found := self.get(seq.snapshot_key)) is not None:
                yield found
            return
        for link in reversed(seq.lineage.chain):
            keys = [key for key in self._by_link.get(link, ()) if key.begins(seq.lineage)]
            keys.sort(key=lambda key: -key.num_tokens)
            yield from map(self._held.__getitem__, keys)

    def can_keep(self, seq: Seq) -> bool:
        """Whether the sequence's current blocks are within the limit of all snapshots."""
        return self.memory.num_blocks(seq.seq_id) <= self.max_blocks

    def keep(self, parent: Seq, snapshot: Seq) -> bool:
        """Keep the sequence's current state, in a snapshot with its key. Returns: whether there was room, and
        it was new."""
        key = snapshot.snapshot_key
        if (found := self.get(key)) is not None:
            self._used_by(snapshot, found)
            return False
        if key is None or not self.can_keep(parent):
            return False
        if not self._make_room(self.memory.num_blocks(parent.seq_id), parent.tenant):
            return False
        assert parent.keys is not None, f"sequence {parent.seq_id} was not added"
        snapshot.keys = parent.keys.fork(snapshot.token_ids)
        snapshot.num_computed, snapshot.account = parent.num_computed, parent.account.fork()
        self.memory.fork(parent.seq_id, snapshot.seq_id, snapshot.keys)
        self._add(key, snapshot)
        return True

    def give_way(self, key: SnapshotKey) -> None:
        """Mark a snapshot as the next to evict, until it is used again."""
        if (found := self._held.get(key)) is not None:
            self._useless.add(found.seq_id)

    def _add(self, key: SnapshotKey, snapshot: Seq) -> None:
        self._held[key] = snapshot
        self._by_link.setdefault(key.chain[-1], []).append(key)
        self._keep_on(snapshot)
        if not self.is_parked(snapshot):
            self._settle(snapshot)

    def _keep_on(self, snapshot: Seq) -> None:
        """Restart the time for which it is kept."""
        if snapshot.keep_s:
            self._kept_until[snapshot.seq_id] = self.clock() + snapshot.keep_s

    def _is_kept(self, snapshot: Seq) -> bool:
        until = self._kept_until.get(snapshot.seq_id)
        return until is not None and self.clock() < until

    def _settle(self, snapshot: Seq) -> None:
        """Record that it is on the device, where it may have been before."""
        self.memory.mark_idle(snapshot.seq_id)
        self._sizes[snapshot.seq_id] = self.memory.num_blocks(snapshot.seq_id)

    def _make_room(self, num_blocks: int, tenant: Tenant) -> bool:
        """Evict others for a tenant's snapshot of this size. Returns: whether there is room now."""
        while self._is_too_much(num_blocks):
            if not self._evict(self._next_to_go(None, tenant, num_blocks)):
                return False
        return True

    def may_unpark(self) -> bool:
        """Whether one more may be on the device."""
        most = self.memory.max_idle
        return most is None or len(self._sizes) < most

    def _is_too_much(self, num_blocks: int) -> bool:
        return not self.may_unpark() or self.num_blocks + num_blocks > self.max_blocks

    def enter(self, snapshot: Seq, table: BlockTable) -> tuple[int | None, ...] | None:
        """Register one that was read from disk; those on the host make room, the least recently used first.

        table: inexact; its block ids are placeholders
        Returns: its host slots, for the caller to fill; None: no room, or already present
        """
        assert snapshot.snapshot_key is not None, "it is found by its key"
        if snapshot.snapshot_key in self._held:
            return None
        parked = [seq for seq in self if self.is_parked(seq) and seq not in self._parked]
        parked.sort(key=self._is_kept)
        slots = self._parking.enter_parked(snapshot.seq_id, table)
        while slots is None and parked:
            self._drop(parked.pop(0))
            slots = self._parking.enter_parked(snapshot.seq_id, table)
        if slots is not None:
            self._add(snapshot.snapshot_key, snapshot)
        return slots

    def adopt(self, snapshot: Seq, table: BlockTable) -> list[int] | None:
        """Register an external snapshot, between two steps, evicting others from the device. Returns: its
        blocks, to be filled at once; None: no room."""
        assert snapshot.snapshot_key is not None, "it is found by its key"
        needed, memory = table.num_blocks, self.memory
        if needed > min(self.max_blocks, memory.num_free + memory.num_idle) or memory.max_idle == 0:
            return None
        while needed > memory.num_free or self._is_too_much(needed):
            victim = self._next_to_go(None, snapshot.tenant, needed)
            assert victim is not None, f"{needed} blocks needed, {memory.num_free} free"
            self._drop(victim)
        blocks = memory.adopt(snapshot.seq_id, table)
        self._add(snapshot.snapshot_key, snapshot)
        return blocks

    def must_wait(self, seq: Seq) -> bool:
        """Whether a waiting, uncomputed sequence has to keep waiting for the disk."""
        if self.below is None or self._reaches(seq):
            return False
        self.below.ask(seq)
        return self.below.must_wait(seq.seq_id)

    def has_requested(self, seq: Seq) -> bool:
        """Whether a snapshot is being read from disk for an arriving sequence."""
        return self.below is not None and not self._reaches(seq) and self.below.ask(seq)

    def _reaches(self, seq: Seq) -> bool:
        """Whether the snapshot on device or host is as long as the one on disk."""
        assert self.below is not None, "there is a disk"
        longest = next(self._of(seq), None)
        on_disk = self.below.find(seq) if longest is not None else None
        return longest is not None and (on_disk is None or on_disk.num_tokens <= longest.num_computed)

    def has_missed(self, seq: Seq) -> bool:
        """Whether a read that a sequence waited for has failed; true only once."""
        has_missed = self.below is not None and self.below.has_missed(seq.seq_id)
        return has_missed and next(self._of(seq), None) is None

    def leave(self, seq_id: int) -> None:
        assert self.below is not None, "there is a disk"
        self.below.leave(seq_id)

    def begin(self, snapshot: Seq, seq: Seq) -> None:
        """Start a sequence as its fork; the snapshot is in blocks, and there is room for the rest."""
        assert seq.keys is not None, f"sequence {seq.seq_id} was not added"
        self._settle(snapshot)
        self._used_by(seq, snapshot)
        self.memory.fork(snapshot.seq_id, seq.seq_id, seq.keys)
        seq.num_computed, seq.begun_with = snapshot.num_computed, snapshot.snapshot_key
        seq.account = snapshot.account.fork_as_prompt(uneven=seq.footprint.eviction_method.uneven)
        seq.dropped = snapshot.dropped
        self._used.append(snapshot)
        self.has_changed = True
        self.num_hits += 1

    def _used_by(self, seq: Seq, snapshot: Seq) -> None:
        """Record a use, or an equal result; moves it behind the others."""
        assert snapshot.snapshot_key is not None, "it is found by its key"
        self._held[snapshot.snapshot_key] = self._held.pop(snapshot.snapshot_key)
        self._useless.discard(snapshot.seq_id)
        snapshot.tenant, snapshot.priority = seq.tenant, min(snapshot.priority, seq.priority)
        snapshot.keep_s = max(snapshot.keep_s, seq.keep_s)
        self._keep_on(snapshot)

    def evict_one(self, spare: Seq | None = None) -> bool:
        """Free the blocks of one that is not on the host; not of `spare`, nor of one used in this step.
        Returns: whether there was one."""
        return self._evict(self._next_to_go(spare))

    def forget_one(self) -> bool:
        """Evict within a step, when nothing can be moved to the host before its blocks are written."""
        if (seq := self._next_to_go(None)) is not None:
            self._drop(seq)
        return seq is not None

    def _next_to_go(self, spare: Seq | None, tenant: Tenant = None, num_more: int = 0) -> Seq | None:
        """Choose the next to evict, if a tenant is to hold num_more blocks more; None: there is none."""
        held, may_go = Counter({tenant: num_more} if num_more else ()), []
        for seq in self:
            if seq.seq_id in self._sizes:
                held[seq.tenant] += self._sizes[seq.seq_id]
                if seq is not spare and seq not in self._used:
                    may_go.append(seq)
        part = self.max_blocks // max(1, len(held))

        def turn(seq: Seq) -> tuple[bool, bool, bool, int, int]:
            num_held = held[seq.tenant]
            is_useless = seq.seq_id in self._useless
            return is_useless, num_held > part, not self._is_kept(seq), seq.priority, num_held

        return max(may_go, key=turn, default=None)

    def _evict(self, seq: Seq | None) -> bool:
        if seq is None:
            return False
        self.memory.mark_active(seq.seq_id)
        if self._parking.park_idle(seq.seq_id):
            del self._sizes[seq.seq_id]
            self._parked.append(seq)
            self.has_changed = True
        else:
            self._drop(seq)
        return True

    def drop(self, key: SnapshotKey | None) -> None:
        """Drop a snapshot if it exists."""
        if (found := self.get(key)) is not None:
            self._drop(found)

    def clear(self) -> None:
        """Forget all."""
        for seq in list(self):
            self._drop(seq)

    def take_gone(self) -> list[Seq]:
        """Return the snapshots dropped since the last call."""
        gone, self._gone, self.has_changed = self._gone, [], False
        return gone

    def take_parked(self) -> list[Seq]:
        """Return the snapshots moved to the host since the last call, which ends a step."""
        parked, self._parked = self._parked, []
        self._used.clear()
        return parked

    def _drop(self, seq: Seq) -> None:
        key = seq.snapshot_key
        assert key is not None, "it is found by its key"
        del self._held[key]
        same_link = self._by_link[key.chain[-1]]
        same_link.remove(key)
        if not same_link:
            del self._by_link[key.chain[-1]]
        self._sizes.pop(seq.seq_id, None)
        self._useless.discard(seq.seq_id)
        self._kept_until.pop(seq.seq_id, None)
        if self.is_parked(seq):
            self._parking.drop_parked(seq.seq_id)
        else:
            self.memory.free(seq.seq_id)
        self._gone.append(seq)
        self.has_changed = True
