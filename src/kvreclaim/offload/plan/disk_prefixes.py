"""Decides which exact prefix blocks are written to disk, and loads them for waiting sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.full import FullAttentionGroup
from kvreclaim.memory.prefix.index import BlockKeys, Entry, Link
from kvreclaim.offload.plan.disk import DiskTier, Loading
from kvreclaim.offload.plan.host_prefixes import HostPrefixes
from kvreclaim.offload.plan.states import DiskStates


class DiskPrefixes:
    """Blocks that are written to disk for running sequences, and loaded for waiting ones.

    Args:
        full, above:   the group of the stored blocks, and the host's side
        disk:          the file's slots and what is on its way
        states:        of recurrent layers, in another file; None: blocks need none
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
        states: DiskStates | None,
        *,
        store_after: int,
        load_wait_s: Callable[[int], float],
        load_is_worth: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        self.disk, self._states = disk, states
        self._full, self._above, self._clock = full, above, clock
        self._store_after, self._load_wait_s, self._load_is_worth = store_after, load_wait_s, load_is_worth
        self._loading: dict[int, Loading] = {}

    @property
    def num_deferred(self) -> int:
        """Sequences that wait for a load."""
        now = self._clock()
        return sum(each.is_pending and now < each.deadline for each in self._loading.values())

    def num_read(self, seq_id: int, num_lower: int) -> int:
        """The number of these slots of the host that were read from disk for a waiting sequence."""
        loading = self._loading.get(seq_id)
        return min(num_lower, 0 if loading is None else len(loading.linked))

    def invalidate(self, seq_id: int, keys: BlockKeys) -> None:
        """Nothing finds the sequence's blocks on disk any more."""
        self.disk.forget(keys, len(self._above.tier.followed.get(seq_id, ())))
        self.disk.tier.invalidate(seq_id)
        if self._states is not None:
            self._states.forget(keys)

    def reset(self) -> None:
        """Forget everything in the file."""
        self.disk.reset()
        if self._states is not None:
            self._states.reset()

    def offer(self) -> None:
        """Write filled slots of the host that the disk lacks."""
        for seq_id, known in self.disk.tier.followed.items():
            self._offer(self._full.tables[seq_id], known, self._above.tier.followed.get(seq_id, []))

    def _offer(self, table: BlockTable, known: list[Entry], above: list[Entry]) -> None:
        """Write the blocks of a sequence that the host holds and the disk does not."""
        if not table.keys.lasting:
            return
        pool, met = self.disk.tier.pool, self._store_after
        parent: Any = known[-1] if known else self.disk.tier.root(table.keys.salt)
        for i in range(len(known), len(above)):
            key = table.keys[i]
            entry = pool.index.find(parent, key) if isinstance(parent, Link) else None
            if entry is not None and i == len(known):
                pool.hit([entry.block], table.priority)
                known.append(entry)
                parent = entry
                continue
            is_live = self._above.tier.pool.index.is_live(above[i])
            if (met > 1 and self._above.met[key.digest] < met) or not is_live:
                return
            parent = self.disk.store(table.keys, i, parent, above[i]) if entry is None else entry
            if parent is None:
                return

    def prefetch(self, seq_id: int, keys: BlockKeys, max_tokens: int) -> None:
        """Begin to load blocks that a waiting sequence would hit on disk alone."""
        if not self._full.prefix.enabled or not keys.lasting:
            return
        most = min(keys.num_tokens - 1, max_tokens)
        size = self._full.block_size
        here, limit = self._full.prefix.match(keys, max_tokens).entries, most // size
        above, below = self._above.tier.run(keys, limit), self.disk.tier.run(keys, limit)
        if self._states is not None:
            goal = self._states.num_useful(keys, limit, here, above, below)
        else:
            goal = 0 if len(here) >= limit or len(below) <= len(above) else len(below)
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
        if self._states is not None:
            self._states.load(seq_id, keys, goal, deadline)

    def must_wait(self, seq_id: int) -> bool:
        """Whether a sequence goes on waiting for a load."""
        loading = self._loading.get(seq_id)
        if loading is not None and loading.after is not None and not loading.is_pending:
            self.end_loading(seq_id)
            self.prefetch(seq_id, loading.keys, loading.max_tokens)
            loading = self._loading.get(seq_id)
        now = self._clock()
        is_pending = loading is not None and loading.is_pending and now < loading.deadline
        return is_pending or (self._states is not None and self._states.must_wait(seq_id, now))

    def end_loading(self, seq_id: int) -> None:
        """A sequence has begun, or will not."""
        loading = self._loading.pop(seq_id, None)
        if loading is not None:
            self.disk.end(loading)
        if self._states is not None:
            self._states.end(seq_id)

    def settle(self) -> None:
        """Enter loads that have arrived."""
        if self._states is not None:
            self._states.link()

    def references(self) -> tuple[Counter[int], Counter[int]]:
        """References of loads and stores to slots of the host and of the file; for checks."""
        host, disk = self.disk.references()
        for loading in self._loading.values():
            host.update([*loading.held, *(entry.block for entry in loading.linked)])
        return host, disk
