"""Prefix index: a hash chain over full blocks that maps exact prefixes to blocks. Each block is hashed
once."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from struct import Struct
from typing import Final, NamedTuple

HashFunction = Callable[[bytes], bytes]
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
"""Not looked up: caching is off, or the request may be served no longer prefix."""
CORRUPT: Final = "corrupt"
"""Another content lies under the same digest."""
STATE: Final = "state"
"""The layers with full attention have it, but no state of the recurrent layers was kept behind it."""
WINDOW: Final = "window"
"""The layers with full attention have it, but no layers with a sliding window what lies before it."""
MISS_REASONS: Final = (COLD, EVICTED, SALT, SUB_BLOCK, INELIGIBLE, CORRUPT, WINDOW, STATE)
"""Why tokens of a prompt were not found."""


def sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


def _field(tag: bytes, payload: bytes) -> bytes:
    """Encode a typed, length-prefixed field: no two lists of fields give the same bytes."""
    return tag + len(payload).to_bytes(8, "little") + payload


class BlockKey(NamedTuple):
    """digest: finds a candidate; tokens: the block's packed token ids, which a hit must equal."""

    digest: bytes
    tokens: bytes


class BlockName(NamedTuple):
    """Name of a block in storage that outlives the process, and so the serials of its index.

    key, parent:     digests of the block and of the block before it
    uid, parent_uid: the same by a second hash, independent of the first one's collisions
    depth:           blocks before it
    tokens:          its packed token ids
    """

    key: bytes
    parent: bytes
    uid: bytes
    parent_uid: bytes
    depth: int
    tokens: bytes


def uid_of(parent: bytes, tokens: bytes) -> bytes:
    """Return blake2b of 16 bytes over the previous uid and the block's tokens."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


def root_uid(salt: str | None) -> bytes:
    """Return the root of the uids of this salt."""
    name = b"n" if salt is None else b"s" + salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=16, person=b"kvreclaim root").digest()


class BlockHash:
    """Hashing of tokens into keys. A block's digest depends on the digest before it and on its own tokens;
    the first one follows a root that depends on the salt and the fingerprint.

    Args:
        block_size:  tokens per block
        fingerprint: other inputs of the KV than the tokens (model, dtype, KV format)
        function:    bytes to digest; tests inject one that collides
    """

    def __init__(self, block_size: int, fingerprint: str = "", function: HashFunction = sha256) -> None:
        self.block_size = block_size
        self._function = function
        self._fingerprint = _field(b"f", fingerprint.encode("utf-8", "surrogatepass"))
        self._packer = Struct(f"<{block_size}q")

    def root(self, salt: str | None) -> bytes:
        """Return the root digest of this salt; None and "" are different salts."""
        field = _field(b"n", b"") if salt is None else _field(b"s", salt.encode("utf-8", "surrogatepass"))
        return self._function(self._fingerprint + field)

    def key(self, parent: bytes, token_ids: Sequence[int]) -> BlockKey:
        """Return the key of one full block after the previous block's digest, 8 bytes per token."""
        tokens = self._packer.pack(*token_ids)
        return BlockKey(self._function(_field(b"p", parent) + _field(b"t", tokens)), tokens)


class BlockKeys:
    """Keys of one sequence, computed on first use and kept for its whole life. Eviction, an index reset or
    preemption do not hash anything again.

    The memory reads block_size, num_tokens, salt and keys[i], and never a token, so keys may also come
    from a trace that has digests only.

    Args:
        hashing:   computes the keys
        token_ids: the sequence's own list, which from now on only grows at its end
        salt:      only sequences of the same salt share blocks
        lasting:   whether a block's bytes are its whole state, so that they may outlive the process
    """

    __slots__ = ("_hashing", "_known", "_token_ids", "_uids", "lasting", "salt")

    def __init__(
        self,
        hashing: BlockHash,
        token_ids: Sequence[int],
        salt: str | None = None,
        *,
        lasting: bool = True,
    ) -> None:
        self.salt, self.lasting = salt, lasting
        self._hashing = hashing
        self._token_ids = token_ids
        self._known: list[BlockKey] = []
        self._uids: list[bytes] = [root_uid(salt)]

    @property
    def block_size(self) -> int:
        return self._hashing.block_size

    @property
    def num_tokens(self) -> int:
        """Number of known tokens of the sequence, computed or not."""
        return len(self._token_ids)

    def __getitem__(self, index: int) -> BlockKey:
        """Return the key of a full block of known tokens; index >= 0."""
        known, size = self._known, self._hashing.block_size
        for i in range(len(known), index + 1):
            parent = known[-1].digest if known else self._hashing.root(self.salt)
            known.append(self._hashing.key(parent, self._token_ids[i * size : (i + 1) * size]))
        return known[index]

    def num_shared(self, other: BlockKeys, most: int) -> int:
        """Return how many of the first `most` blocks, with all tokens known to both, have the same keys in
        another sequence. A key covers all blocks before it: O(log most), once keys are computed."""
        places = range(most)
        return bisect_left(places, True, key=lambda index: self[index] != other[index])

    def name(self, index: int) -> BlockName:
        """Return the block's name on disk."""
        key, uids = self[index], self._uids
        for i in range(len(uids) - 1, index + 1):
            uids.append(uid_of(uids[i], self[i].tokens))
        parent = self[index - 1].digest if index else self._hashing.root(self.salt)
        return BlockName(key.digest, parent, uids[index + 1], uids[index], index, key.tokens)

    def fork(self, token_ids: Sequence[int]) -> BlockKeys:
        """Return the keys of another sequence with the same tokens so far."""
        child = BlockKeys(self._hashing, token_ids, self.salt, lasting=self.lasting)
        child._known, child._uids = self._known.copy(), self._uids.copy()
        return child


@dataclass(slots=True, eq=False)
class Link:
    """A point in a chain that a block can be appended to; the root of a salt is one.

    serial is unique, so equal serials mean the same entry (or the same root epoch).
    """

    serial: Final[int]
    salt: Final[str | None]


@dataclass(slots=True, eq=False)
class Entry(Link):
    """A full block that can be hit.

    digest, tokens: the block's key; parent: serial of the link before it.
    """

    digest: Final[bytes]
    block: Final[int]
    tokens: Final[bytes]
    parent: Final[int]


class PrefixIndex:
    """Digest to entry, and block to entry: a bijection.

    The digest only finds a candidate. A hit must also have the same tokens, the same salt and,
    as its parent, the entry that the walk came through, so by induction the whole prefix is equal
    for any hash function. An entry with an evicted parent can't be reached.

    Args:
        remembered: most recent digests of evicted blocks that are remembered, 1 to NUM_REMEMBERED: at least
                    this many and at most twice as many
    """

    def __init__(self, remembered: int = NUM_REMEMBERED) -> None:
        self.remembered = max(1, min(remembered, NUM_REMEMBERED))
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
