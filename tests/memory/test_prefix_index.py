from __future__ import annotations

import hashlib
import struct

import pytest

from kvreclaim.memory.prefix_index import Entry, PrefixIndex


def constant(message: bytes) -> bytes:
    return b"same"


def add(index: PrefixIndex, block: int, tokens: list[int], parent=None, salt=None) -> Entry:
    parent = index.root(salt) if parent is None else parent
    packed = index.pack(tokens)
    return index.add(parent, index.digest(parent, packed), packed, block)


def test_the_key_is_sha256_over_typed_length_prefixed_fields():
    """Pinned: whoever stores these digests (offload tiers) must read them back tomorrow."""
    index = PrefixIndex(2, "model")
    root = b"f" + struct.pack("<Q", 5) + b"model" + b"s" + struct.pack("<Q", 2) + b"me"
    assert index.root("me").digest == hashlib.sha256(root).digest()
    parent = hashlib.sha256(root).digest()
    block = b"p" + struct.pack("<Q", 32) + parent + b"t" + struct.pack("<Qqq", 16, 7, -1)
    assert index.digest(index.root("me"), index.pack([7, -1])) == hashlib.sha256(block).digest()


def test_salts_and_fingerprints_give_different_roots():
    salts = [None, "", "None", "n", "s", "\0", "é", "\ud800"]
    pairs = [("", salt) for salt in salts] + [("m", None), ("m", ""), ("mn", None), ("", "m"), ("ms", "")]
    digests = {PrefixIndex(4, fingerprint).root(salt).digest for fingerprint, salt in pairs}
    assert len(digests) == len(pairs)


@pytest.mark.parametrize(
    ("one", "other"),
    [([1, 23], [12, 3]), ([1, 1], [1, 257]), ([0, 1], [1, 0]), ([1, 0], [256, 0]), ([-1, 0], [2**63 - 1, 0])],
)
def test_tokens_do_not_run_together(one, other):
    index = PrefixIndex(2)
    root = index.root(None)
    assert index.digest(root, index.pack(one)) != index.digest(root, index.pack(other))


def test_the_same_tokens_split_otherwise_are_another_prefix():
    """[1 2][3 4] after the root is not [3 4] after the root, nor [1 2] after [3 4]."""
    index = PrefixIndex(2)
    first = add(index, 0, [1, 2])
    second = add(index, 1, [3, 4], first)
    root = index.root(None)
    assert index.find(root, index.pack([1, 2])) is first
    assert index.find(first, index.pack([3, 4])) is second
    assert index.find(root, index.pack([3, 4])) is None
    assert index.find(second, index.pack([1, 2])) is None
    assert index.find(first, index.pack([1, 2])) is None


@pytest.mark.parametrize(("owner", "guest"), [(None, ""), ("", None), ("a", None), ("a", "b"), ("a", "a\0")])
def test_salts_isolate(owner, guest):
    index = PrefixIndex(2)
    entry = add(index, 0, [1, 2], salt=owner)
    assert index.find(index.root(owner), index.pack([1, 2])) is entry
    assert index.find(index.root(guest), index.pack([1, 2])) is None


@pytest.mark.parametrize("salt", [None, "a"])
def test_a_colliding_hash_never_gives_a_wrong_hit(salt):
    """Every digest is the same: tokens, salt and parent still tell blocks apart."""
    index = PrefixIndex(2, hash_function=constant)
    entry = add(index, 0, [1, 2], salt=salt)
    assert index.find(index.root(salt), index.pack([1, 2])) is entry
    assert index.find(index.root(salt), index.pack([2, 1])) is None
    assert index.find(index.root("other"), index.pack([1, 2])) is None
    assert index.find(entry, index.pack([1, 2])) is None


def test_a_parent_that_came_back_is_another_parent():
    index = PrefixIndex(2)
    first = add(index, 0, [1, 2])
    add(index, 1, [3, 4], first)
    index.remove(0)
    assert not index.is_live(first)
    again = add(index, 2, [1, 2])
    assert again.digest == first.digest
    assert index.find(again, index.pack([3, 4])) is None


def test_clear_ends_every_chain():
    index = PrefixIndex(2)
    root, entry = index.root(None), add(index, 0, [1, 2])
    index.clear()
    assert (len(index), 0 in index, index.of(0)) == (0, False, None)
    assert not index.is_live(root)
    assert not index.is_live(entry)
    assert index.is_live(index.root(None))


def test_refuses_to_overwrite_an_entry():
    index = PrefixIndex(2)
    add(index, 0, [1, 2])
    with pytest.raises(AssertionError, match="key leads to another block"):
        add(index, 1, [1, 2])
    with pytest.raises(AssertionError, match="indexed already"):
        add(index, 0, [3, 4])
    index.check()


def test_a_block_is_packed_whole():
    with pytest.raises(struct.error):
        PrefixIndex(2).pack([1])
