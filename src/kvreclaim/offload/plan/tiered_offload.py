"""Slots below the pool, on the host and on disk: exact prefixes and parked sequences."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.groups.full import FullAttentionGroup
from kvreclaim.memory.groups.recurrent import RecurrentGroup
from kvreclaim.memory.offload import Move, OffloadSlots
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import INELIGIBLE, BlockKeys
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.offload.plan.disk import DiskTier
from kvreclaim.offload.plan.disk_prefixes import DiskPrefixes
from kvreclaim.offload.plan.host_prefixes import HostPrefixes
from kvreclaim.offload.plan.parking import ParkedSequences
from kvreclaim.offload.plan.states import DiskStates, HostStates
from kvreclaim.offload.plan.tier import Tier


@dataclass(slots=True)
class TierCounts:
    """Since the start. Tokens in full blocks, counted whenever a sequence is admitted.

    asked:     that the pool did not have
    from_host: of these, found on the host; from_disk: of these, read from disk while the sequence waited
    """

    asked: int = 0
    from_host: int = 0
    from_disk: int = 0


NEVER = 1 << 62
"""Times that no block is met."""


class TieredOffload(OffloadSlots):
    """Exact full blocks also lie in host slots, as long as these have room, and in slots of a file below;
    preempted sequences keep their blocks in host slots.

    Integers only: the caller carries out the moves, each of which is handed out once.

    - `parking.pop_moves_out`: block to slot, before anything else in a step
    - `pop_moves_in`: slot to block, before anything is computed; `release_copy_sources` says they are made
    - `pop_stores`: block to slot, after commits and before the blocks change; `stored` says they are made
    - `disk.take_transfers`: between slots

    Args:
        states:               of recurrent layers, parked with the blocks; None: the model has none
        num_host_slots:       >= 1
        max_parked:           slots that parked sequences may have for themselves; None: all
        host_eviction_policy: of the slots
        store_after:          times that a block must have been met before it is stored, 1 for at once
        store_decoded:        whether blocks are stored that hold tokens behind the prompt
        num_host_states:      slots for states behind prefixes on the host; 0: none are kept there
        num_disk_slots:       0 for no disk below the host
        num_disk_states:      slots of a file for states behind prefixes on disk; 0: none are kept there
        disk_eviction_policy: of the file's slots
        disk_store_after:     times that a block must have been met before it is written to disk
        load_wait_s:          seconds that a sequence waits for what is being loaded, by tokens to load
        races:                whether sequences compute while blocks are loaded, and take over what has come
        load_is_worth:        whether loading so many tokens takes less time than computing them
        clock:                seconds, never backwards
    """

    def __init__(
        self,
        full: FullAttentionGroup,
        states: RecurrentGroup | None = None,
        *,
        num_host_slots: int,
        max_parked: int | None = None,
        host_eviction_policy: str = "lru",
        store_after: int = 1,
        store_decoded: bool = True,
        num_host_states: int = 0,
        num_disk_slots: int = 0,
        num_disk_states: int = 0,
        disk_eviction_policy: str = "lru",
        disk_store_after: int = 1,
        load_wait_s: Callable[[int], float] = lambda _: 10.0,
        races: bool = False,
        load_is_worth: Callable[[int], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_host_slots < 1:
            raise InvalidArgumentError(
                f"num_host_slots is {num_host_slots}; a tier has at least 1 slot; give the host more memory"
            )
        self.num_slots = num_host_slots
        self.host = Tier(num_host_slots, host_eviction_policy)
        self.disk = DiskTier(self.host, num_disk_slots, disk_eviction_policy) if num_disk_slots else None
        assert num_host_states or not num_disk_states, "states on disk come from the host"
        self.states: HostStates | None = None
        self.states_on_disk: DiskStates | None = None
        if num_host_states:
            assert states is not None, "states on the host are those of recurrent layers"
            self.states = HostStates(states, self.host, num_host_states)
            if num_disk_states and self.disk is not None:
                self.states_on_disk = DiskStates(
                    states, self.states, self.disk, num_disk_states, disk_store_after
                )
                self.states.below = self.states_on_disk
        self.prefixes = HostPrefixes(
            full,
            self.host,
            None if self.disk is None else self.disk.tier,
            self.states,
            store_after=store_after,
            store_decoded=store_decoded,
            count_to=max(store_after, disk_store_after),
            races=races,
        )
        self.on_disk: DiskPrefixes | None = None
        if self.disk is not None:
            self.on_disk = DiskPrefixes(
                full,
                self.prefixes,
                self.disk,
                self.states_on_disk,
                store_after=disk_store_after,
                load_wait_s=load_wait_s,
                load_is_worth=load_is_worth,
                clock=clock,
            )
        self.parking: ParkedSequences = ParkedSequences(full, self.prefixes, max_parked, states, self.states)
        self.counts = TierCounts()
        self._full = full

    @property
    def index_version(self) -> int:
        states = 0 if self.states is None else self.states.slots.version
        return self.host.pool.index.version + states

    # What has happened.

    def with_lower(self, match: PrefixMatch, whole: PrefixMatch, max_tokens: int | None) -> PrefixMatch:
        if not self._full.prefix.enabled:
            return match
        most = match.keys.num_tokens - 1
        limit = most if max_tokens is None else min(most, max_tokens)
        return self.prefixes.with_lower(match, whole, limit // self._full.block_size)

    def admitted(self, seq_id: int, table: BlockTable, match: PrefixMatch) -> None:
        self.prefixes.admit(seq_id, table, match)
        if table.chain is not None:
            self.prefixes.follow(seq_id, table)
        self._count_below(seq_id, match)
        self.end_loading(seq_id)

    def _count_below(self, seq_id: int, match: PrefixMatch) -> None:
        """Count each token that the pool lacks as the host's, the disk's or a miss."""
        if match.miss == INELIGIBLE:
            return
        size, counts, num_lower = self._full.block_size, self.counts, len(match.lower)
        num_read = 0 if self.on_disk is None else self.on_disk.num_read(seq_id, num_lower)
        self.prefixes.num_from_disk[seq_id] = num_read
        counts.asked += ((match.keys.num_tokens - 1) // size - len(match.entries)) * size
        counts.from_disk += num_read * size
        counts.from_host += (num_lower - num_read) * size

    def num_from_disk(self, seq_id: int) -> int:
        """Tokens that a running sequence began with and that were read from disk while it waited."""
        return self.prefixes.num_from_disk.get(seq_id, 0) * self._full.block_size

    def forked(self, parent_id: int, child_id: int) -> None:
        self.prefixes.fork(parent_id, child_id)

    def copied(self, copies: Sequence[Move]) -> None:
        self.parking.copied(copies)

    def committed(self, seq_id: int, table: BlockTable) -> None:
        if table.chain is None:
            self.prefixes.unfollow(seq_id)
        else:
            self.prefixes.offer(seq_id, table)

    def freed(self, seq_id: int) -> None:
        self.prefixes.free(seq_id)
        self.parking.freed()

    def invalidated(self, seq_id: int, table: BlockTable) -> None:
        if self.on_disk is not None:
            self.on_disk.invalidate(seq_id, table.keys)
        self.host.invalidate(seq_id)
        self.prefixes.unfollow(seq_id)

    def reset(self, *, external: bool) -> None:
        """Like OffloadSlots's; on disk once the caller has done what `disk.take_reset` says."""
        if external:
            self.host.pool.clear_index()
            if self.on_disk is not None:
                self.on_disk.reset()
            if self.states is not None:
                self.states.slots.reset()
        for seq_id in list(self.host.followed):
            self.prefixes.unfollow(seq_id)

    def release_copy_sources(self) -> None:
        self.prefixes.release_copy_sources()
        self.parking.release_copy_sources()

    # Questions.

    def num_below(self, seq_id: int) -> int:
        return len(self.host.followed.get(seq_id, ()))

    def extend(self, seq_id: int, max_tokens: int) -> int:
        return self.prefixes.extend(self._full.tables[seq_id], max_tokens)

    def prefetch(self, seq_id: int, keys: BlockKeys, max_tokens: int) -> None:
        if self.on_disk is not None:
            self.on_disk.prefetch(seq_id, keys, max_tokens)

    def must_wait(self, seq_id: int) -> bool:
        return self.on_disk is not None and self.on_disk.must_wait(seq_id)

    def end_loading(self, seq_id: int) -> None:
        if self.on_disk is not None:
            self.on_disk.end_loading(seq_id)

    def pop_moves_in(self) -> list[Move]:
        self.parking.loaded()
        return self.prefixes.pop_moves_in()

    def pop_stores(self) -> list[Move]:
        return self.prefixes.pop_stores()

    def forget_slots(self, slots: Sequence[int]) -> None:
        self.prefixes.forget_slots(slots)

    def stored(self) -> None:
        if self.on_disk is not None:
            self.on_disk.offer()

    def check(self) -> None:
        on_host = self.prefixes.references() + self.parking.references()
        if self.on_disk is not None:
            for_transfers, on_disk = self.on_disk.references()
            on_host += for_transfers
            tier = self.on_disk.disk.tier
            _check_slots("disk", tier.pool, on_disk + tier.references())
        _check_slots("host", self.host.pool, on_host)
        self.parking.check()
        if self.states_on_disk is not None:
            self.states_on_disk.check()
        if self.states is not None:
            self.states.check(self.parking.state_slots)


def _check_slots(name: str, pool: BlockPool, held: Counter[int]) -> None:
    pool.check()
    references = {slot: refs for slot, refs in enumerate(pool.refs) if refs}
    assert held == references, f"{name} slots: {dict(held)} held, {references} in the pool"
