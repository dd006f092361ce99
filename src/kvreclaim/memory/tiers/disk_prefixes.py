"""Exact prefixes on disk: slots that running sequences have, and what is loaded for waiting ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.full import FullAttentionGroup
from kvreclaim.memory.prefix.index import Entry, Link
from kvreclaim.memory.prefix.keys import BlockKeys
from kvreclaim.memory.tiers.disk import DiskTier, Loading
from kvreclaim.memory.tiers.host_prefixes import HostPrefixes


class NoDiskPrefixes:
    """No disk below the host. DiskPrefixes overrides all of this."""

    @property
    def num_deferred(self) -> int:
        """Sequences that wait for what is being loaded for them."""
        return 0

    def begin(self, seq_id: int, num_lower: int) -> int:
        """A sequence begins with so many slots of the host. Returns: how many were read from disk for it."""
        return 0

    def num_from_disk(self, seq_id: int) -> int:
        """Blocks that a running sequence began with and that were read from disk while it waited."""
        return 0

    def follow(self, seq_id: int, table: BlockTable) -> None:
        """Reference the file's slots that hold a sequence's first blocks from now on."""

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child references the same slots."""

    def unfollow(self, seq_id: int) -> None:
        """The sequence references no slots any more."""

    def free(self, seq_id: int) -> None:
        """A sequence is gone."""

    def invalidate(self, seq_id: int, keys: BlockKeys) -> None:
        """Nothing finds the sequence's blocks on disk any more."""

    def reset(self) -> None:
        """Forget all that the file holds."""

    def offer(self) -> None:
        """The host's slots are filled: have those written that the disk lacks."""

    def prefetch(self, seq_id: int, keys: BlockKeys, max_tokens: int) -> None:
        """Begin to load what a waiting sequence would hit on disk and nowhere above."""

    def must_wait(self, seq_id: int) -> bool:
        """Whether a sequence is to wait for what is being loaded for it."""
        return False

    def end_loading(self, seq_id: int) -> None:
        """A sequence has begun, or will not."""

    def settle(self) -> None:
        """Something has come from disk."""

    def references(self) -> tuple[Counter[int], Counter[int]]:
        """To slots of the host and of the file; for checks."""
        return Counter(), Counter()


class NoDiskStates:
    """Blocks on disk need no states. DiskStates overrides all of this."""

    def goal(
        self,
        keys: BlockKeys,
        limit: int,
        here: Sequence[Entry],
        above: Sequence[Entry],
        below: Sequence[Entry],
    ) -> int:
        """How many of the first `limit` blocks the host is to have; 0: none on disk is of use. here, above,
        below: the entries that the pool, the host and the disk have"""
        return 0 if len(here) >= limit or len(below) <= len(above) else len(below)

    def load(self, seq_id: int, keys: BlockKeys, depth: int, deadline: float) -> None:
        """Begin to load the state behind the first `depth` blocks."""

    def must_wait(self, seq_id: int, now: float) -> bool:
        """Whether the sequence goes on waiting for a state."""
        return False

    def end(self, seq_id: int) -> None:
        """The sequence waits no more."""

    def link(self) -> None:
        """Something has come from disk."""

    def forget(self, keys: BlockKeys) -> None:
        """Nothing finds the states behind these blocks any more."""

    def reset(self) -> None:
        """Forget all that the file holds."""


class DiskPrefixes(NoDiskPrefixes):
    """Running sequences reference the file's slots of their blocks; waiting ones may have some loaded.

    Args:
        full, above:   the group whose blocks are stored, and the host's side
        disk:          the file's slots and what is on its way
        states:        of recurrent layers, in a file beside
        store_after:   times that a block must have been met before it is written to disk
        load_wait_s:   seconds that a sequence waits for what is being loaded, by tokens to load
        load_is_worth: whether loading so many tokens takes less time than computing them
        clock:         seconds, never backwards
    """

    def __init__(
        self,
        full: FullAttentionGroup,
        above: HostPrefixes,
        disk: DiskTier,
        states: NoDiskStates,
        *,
        store_after: int,
        load_wait_s: Callable[[int], float],
        load_is_worth: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        self.disk, self._states = disk, states
        self._full, self._above, self._clock = full, above, clock
        self._store_after, self._load_wait_s, self._load_is_worth = store_after, load_wait_s, load_is_worth
        self._on_disk: dict[int, list[Entry]] = {}
        self._loading: dict[int, Loading] = {}
        self._from_disk: dict[int, int] = {}

    def begin(self, seq_id: int, num_lower: int) -> int:
        loading = self._loading.get(seq_id)
        num_read = min(num_lower, 0 if loading is None else len(loading.linked))
        self._from_disk[seq_id] = num_read
        return num_read

    def num_from_disk(self, seq_id: int) -> int:
        return self._from_disk.get(seq_id, 0)

    def follow(self, seq_id: int, table: BlockTable) -> None:
        self._on_disk[seq_id] = known = self.disk.run(table.keys, len(table.entries))
        self.disk.tier.pool.hit([entry.block for entry in known], table.priority)

    def fork(self, parent_id: int, child_id: int) -> None:
        if (known := self._on_disk.get(parent_id)) is not None:
            for entry in known:
                self.disk.tier.pool.touch(entry.block)
            self._on_disk[child_id] = known.copy()

    def unfollow(self, seq_id: int) -> None:
        self.disk.tier.pool.release(entry.block for entry in reversed(self._on_disk.pop(seq_id, ())))

    def free(self, seq_id: int) -> None:
        self.unfollow(seq_id)
        self._from_disk.pop(seq_id, None)

    def invalidate(self, seq_id: int, keys: BlockKeys) -> None:
        self.disk.forget(keys, len(self._above.below.get(seq_id, ())))
        for entry in reversed(self._on_disk.get(seq_id, ())):
            self.disk.tier.pool.unindex(entry.block)
        self._states.forget(keys)

    def reset(self) -> None:
        self.disk.reset()
        self._states.reset()

    def offer(self) -> None:
        for seq_id, known in self._on_disk.items():
            self._offer(self._full.tables[seq_id], known, self._above.below.get(seq_id, []))

    def _offer(self, table: BlockTable, known: list[Entry], above: list[Entry]) -> None:
        """Have written what the host holds of a sequence's blocks and the disk does not."""
        if not table.keys.lasting:
            return
        pool, met = self.disk.tier.pool, self._store_after
        parent: Any = known[-1] if known else self.disk.root(table.keys.salt)
        for i in range(len(known), len(above)):
            key = table.keys[i]
            entry = pool.index.find(parent, key) if isinstance(parent, Link) else None
            if entry is not None and i == len(known):
                pool.hit([entry.block], table.priority)
                known.append(entry)
                parent = entry
                continue
            is_live = self._above.host.pool.index.is_live(above[i])
            if (met > 1 and self._above.met[key.digest] < met) or not is_live:
                return
            parent = self.disk.store(table.keys, i, parent, above[i]) if entry is None else entry
            if parent is None:
                return

    def prefetch(self, seq_id: int, keys: BlockKeys, max_tokens: int) -> None:
        if not self._full.prefix.enabled or not keys.lasting:
            return
        most = min(keys.num_tokens - 1, max_tokens)
        size = self._full.block_size
        here, limit = self._full.prefix.match(keys, max_tokens).entries, most // size
        above, below = self._above.host.run(keys, limit), self.disk.run(keys, limit)
        goal = self._states.goal(keys, limit, here, above, below)
        missing = max(0, goal - len(above)) * size
        if not goal or not self._load_is_worth(missing or goal * size):
            return
        deadline = self._clock() + self._load_wait_s(missing)
        if missing:
            loading = self.disk.load(keys, most if goal == len(below) else goal * size, deadline)
            if loading is None:
                return
            self._loading[seq_id] = loading
            self._above.forget_twins([transfer.host_slot for transfer in loading.transfers])
        self._states.load(seq_id, keys, goal, deadline)

    def must_wait(self, seq_id: int) -> bool:
        loading = self._loading.get(seq_id)
        if loading is not None and loading.after is not None and not loading.is_pending:
            self.end_loading(seq_id)
            self.prefetch(seq_id, loading.keys, loading.max_tokens)
            loading = self._loading.get(seq_id)
        now = self._clock()
        is_pending = loading is not None and loading.is_pending and now < loading.deadline
        return is_pending or self._states.must_wait(seq_id, now)

    @property
    def num_deferred(self) -> int:
        now = self._clock()
        return sum(each.is_pending and now < each.deadline for each in self._loading.values())

    def end_loading(self, seq_id: int) -> None:
        loading = self._loading.pop(seq_id, None)
        if loading is not None:
            self.disk.end(loading)
        self._states.end(seq_id)

    def settle(self) -> None:
        self._states.link()

    def references(self) -> tuple[Counter[int], Counter[int]]:
        host, disk = self.disk.references()
        for loading in self._loading.values():
            host.update([*loading.held, *(entry.block for entry in loading.linked)])
        for entries in self._on_disk.values():
            disk.update(entry.block for entry in entries)
        return host, disk
