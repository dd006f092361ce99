"""One tier: slots that hold blocks' bytes elsewhere, with an index and an order of eviction of their own."""

from __future__ import annotations

from collections.abc import Iterable

from kvreclaim.memory.eviction import make_order
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import NUM_REMEMBERED, Entry, Link, PrefixIndex
from kvreclaim.memory.prefix.keys import BlockKeys


class Tier:
    """A slot is to a tier what a block is to the pool: referenced, cached or free. An entry's parent is in
    the same tier's index, so a walk begins at this tier's own root.

    Args:
        num_slots:       >= 1
        eviction_policy: in which order cached slots are used again
    """

    def __init__(self, num_slots: int, eviction_policy: str) -> None:
        order = make_order(eviction_policy, num_slots)
        self.pool = BlockPool(num_slots, PrefixIndex(min(num_slots, NUM_REMEMBERED)), order=order)

    def root(self, salt: str | None) -> Link:
        return self.pool.index.root(salt)

    def run(self, keys: BlockKeys, limit: int, salt: str | None = None) -> list[Entry]:
        """The entries of the first blocks of these keys, up to `limit`, as far as all of them are here. salt:
        under which they stand, where that is not the keys' own"""
        index, found = self.pool.index, list[Entry]()
        link = index.root(keys.salt if salt is None else salt)
        for i in range(limit):
            entry = index.find(link, keys[i])
            if entry is None:
                break
            found.append(entry)
            link = entry
        return found

    def use(self, entries: Iterable[Entry], priority: int) -> None:
        """A request has met what these slots hold, here or above: they are as recent as it."""
        slots = [entry.block for entry in entries]
        self.pool.hit(slots, priority)
        self.pool.release(reversed(slots))
