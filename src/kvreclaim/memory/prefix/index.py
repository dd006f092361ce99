"""Prefix index: a hash chain over full blocks that maps exact prefixes to blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvreclaim.memory.prefix.keys import BlockKey

NUM_REMEMBERED = 65_536

COLD: Final = "cold"
"""Never seen, or longer ago than is remembered."""
EVICTED: Final = "evicted"
"""Was there, and its block, or one before it, was reused lately."""
SALT: Final = "salt"
"""The prompt's first block is there, under another salt."""
SUB_BLOCK: Final = "sub_block"
"""The tail that fills no block; at least the one token that must be computed."""
INELIGIBLE: Final = "ineligible"
"""Nobody looked: caching is off, or the request may be served no longer prefix."""
CORRUPT: Final = "corrupt"
"""Another content lies under the same digest."""

STATE: Final = "state"
"""The layers with full attention have it, but no state of the recurrent layers was kept behind it."""

WINDOW: Final = "window"
"""The layers with full attention have it, but no layers with a sliding window what lies before it."""

MISS_REASONS: Final = (COLD, EVICTED, SALT, SUB_BLOCK, INELIGIBLE, CORRUPT, WINDOW, STATE)
"""Why tokens of a prompt were not found."""


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A point in a chain that a block can be appended to; the root of a salt is one.

    serial is unique, so equal serials mean the same entry (or the same root epoch).
    """

    serial: int
    salt: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Link):
    """A full block that can be hit.

    digest, tokens: the block's key; parent: serial of the link before it.
    """

    digest: bytes
    block: int
    tokens: bytes
    parent: int


class PrefixIndex:
    """Digest to entry, and block to entry: a bijection.

    The digest only finds a candidate. A hit must also have the same tokens, the same salt and,
    as its parent, the entry that the walk came through, so by induction the whole prefix is equal
    for any hash function. An entry with an evicted parent can't be reached.

    Args:
        remembered: most recent digests of evicted blocks that are remembered, at least this many and at
                    most twice as many
    """

    def __init__(self, remembered: int = NUM_REMEMBERED) -> None:
        self.remembered = remembered
        self._serials = count()
        self._root_serial = next(self._serials)
        self._by_digest: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._firsts: dict[bytes, int] = {}
        self._evicted: set[bytes] = set()
        self._evicted_before: set[bytes] = set()
        self.version = 0
        """Grows whenever an answer of find may have changed."""

    def __len__(self) -> int:
        return len(self._by_digest)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_digest.values())

    def root(self, salt: str | None) -> Link:
        """Return the root of this salt's chains."""
        return Link(self._root_serial, salt)

    def at(self, digest: bytes) -> Entry | None:
        """Return the entry under this digest, unverified."""
        return self._by_digest.get(digest)

    def find(self, parent: Link, key: BlockKey) -> Entry | None:
        """Return the entry with exactly this key's tokens after exactly this prefix."""
        entry = self._by_digest.get(key.digest)
        return entry if entry is not None and self.follows(entry, parent, key) else None

    @staticmethod
    def follows(entry: Entry, parent: Link, key: BlockKey) -> bool:
        """Return whether the entry holds the key's tokens after this prefix: compared, not hashed."""
        return entry.parent == parent.serial and entry.tokens == key.tokens and entry.salt == parent.salt

    def is_live(self, link: Link) -> bool:
        """Return whether a walk can still come through this link's own entry (or root)."""
        if isinstance(link, Entry):
            return self._by_digest.get(link.digest) is link
        return link.serial == self._root_serial

    def add(self, parent: Link, key: BlockKey, block: int) -> Entry:
        """Enter a block under a free digest; the parent must be live."""
        digest, tokens = key
        assert digest not in self._by_digest, f"block {block}: its key leads to another block"
        assert block not in self._by_block, f"block {block} is indexed already"
        assert self.is_live(parent), f"block {block}: its parent (serial {parent.serial}) is gone"
        self.version += 1
        entry = Entry(next(self._serials), parent.salt, digest, block, tokens, parent.serial)
        self._by_digest[digest] = entry
        self._by_block[block] = entry
        if parent.serial == self._root_serial:
            self._firsts[tokens] = self._firsts.get(tokens, 0) + 1
        return entry

    def remove(self, block: int) -> None:
        """Forget a block that is indexed."""
        self.version += 1
        entry = self._by_block.pop(block)
        del self._by_digest[entry.digest]
        if entry.parent == self._root_serial:
            self._drop_first(entry)

    def evict(self, blocks: Iterable[int]) -> None:
        """Forget blocks that are indexed, but remember their digests for a while."""
        self.version += 1
        by_block, by_digest, root = self._by_block, self._by_digest, self._root_serial
        for block in blocks:
            entry = by_block.pop(block)
            del by_digest[entry.digest]
            if len(self._evicted) >= self.remembered:
                self._evicted_before, self._evicted = self._evicted, set()
            self._evicted.add(entry.digest)
            if entry.parent == root:
                self._drop_first(entry)

    def _drop_first(self, entry: Entry) -> None:
        others = self._firsts[entry.tokens] - 1
        if others:
            self._firsts[entry.tokens] = others
        else:
            del self._firsts[entry.tokens]

    def why_missing(self, parent: Link, key: BlockKey) -> str:
        """Return the reason why find(parent, key) is None. Changes nothing."""
        digest, tokens = key
        entry = self._by_digest.get(digest)
        if entry is not None and (entry.tokens != tokens or entry.salt != parent.salt):
            return CORRUPT
        if entry is not None or digest in self._evicted or digest in self._evicted_before:
            return EVICTED
        if parent.serial == self._root_serial and tokens in self._firsts:
            return SALT
        return COLD

    def clear(self) -> None:
        """Forget everything. Chains that began before cannot continue."""
        self.version += 1
        self._by_digest.clear()
        self._by_block.clear()
        self._firsts.clear()
        self._evicted.clear()
        self._evicted_before.clear()
        self._root_serial = next(self._serials)

    def check(self) -> None:
        """Check that the two directions agree. Raises: AssertionError."""
        assert len(self._by_digest) == len(self._by_block), f"{len(self._by_digest)} != {len(self._by_block)}"
        for digest, entry in self._by_digest.items():
            assert digest == entry.digest, f"block {entry.block} lies under another digest than its own"
            assert self._by_block.get(entry.block) is entry, f"block {entry.block} maps to another entry"
            assert entry.parent < entry.serial, f"serial {entry.serial} has the later parent {entry.parent}"
        firsts = Counter(e.tokens for e in self._by_digest.values() if e.parent == self._root_serial)
        assert firsts == self._firsts, f"{firsts.total()} chains begin, {sum(self._firsts.values())} counted"
        assert len(self._evicted) <= self.remembered, f"{len(self._evicted)} evicted digests remembered"
