"""Keys of a sequence's full blocks for the prefix index. Each block is hashed once."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple

HashFunction = Callable[[bytes], bytes]


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
