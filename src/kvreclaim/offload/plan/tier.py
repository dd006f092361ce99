"""The slots of one tier, host or disk: pool, prefix index and eviction order."""

from __future__ import annotations

from collections import Counter

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.eviction import make_order
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import BlockKeys, Entry, Link, PrefixIndex, root_uid


class Tier:
    """A slot is to a tier what a block is to the pool: referenced, cached or free. An entry's parent is in
    the same tier's index, so a walk begins at this tier's own root.

    While a sequence runs it references the slots of its exact blocks, so that of a chain the deepest slot is
    reused first.

    Args:
        num_slots:       >= 1
        eviction_policy: in which order cached slots are reused
        hides_salts:     whether chains stand under the root's uid instead of the salt, which is a secret
    """

    def __init__(self, num_slots: int, eviction_policy: str, *, hides_salts: bool = False) -> None:
        order = make_order(eviction_policy, num_slots)
        self.pool = BlockPool(num_slots, PrefixIndex(num_slots), order=order)
        self.followed: dict[int, list[Entry]] = {}
        """The entries that a running sequence references, in the order of its blocks."""
        self._hides_salts = hides_salts

    def root(self, salt: str | None) -> Link:
        return self.pool.index.root(root_uid(salt).hex() if self._hides_salts else salt)

    def run(self, keys: BlockKeys, limit: int) -> list[Entry]:
        """The entries of the first blocks of these keys, up to `limit`, as far as all of them are here."""
        index, found = self.pool.index, list[Entry]()
        link = self.root(keys.salt)
        for i in range(limit):
            entry = index.find(link, keys[i])
            if entry is None:
                break
            found.append(entry)
            link = entry
        return found

    def follow(self, seq_id: int, table: BlockTable) -> None:
        """Reference the slots that hold a sequence's first blocks from now on."""
        self.followed[seq_id] = known = self.run(table.keys, len(table.entries))
        self.pool.hit([entry.block for entry in known], table.priority)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let the child reference its parent's slots."""
        if (known := self.followed.get(parent_id)) is not None:
            for entry in known:
                self.pool.touch(entry.block)
            self.followed[child_id] = known.copy()

    def unfollow(self, seq_id: int) -> None:
        """Drop the sequence's references."""
        self.pool.release(entry.block for entry in reversed(self.followed.pop(seq_id, ())))

    def invalidate(self, seq_id: int) -> None:
        """Unindex the slots that the sequence references."""
        for entry in reversed(self.followed.get(seq_id, ())):
            self.pool.unindex(entry.block)

    def references(self) -> Counter[int]:
        """References of running sequences; for checks."""
        return Counter(entry.block for entries in self.followed.values() for entry in entries)
