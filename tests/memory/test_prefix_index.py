from __future__ import annotations

import pytest

from kvreclaim.memory import BlockKeys
from kvreclaim.memory.prefix.index import Entry, Link, PrefixIndex
from kvreclaim.memory.prefix.keys import BlockHash, BlockKey

Blocks = list[list[int]]


def constant(message: bytes) -> bytes:
    return b"same"


def key(blocks: Blocks, salt: str | None = None, hashing: BlockHash | None = None) -> BlockKey:
    """Of the last of these blocks of two tokens."""
    tokens = [token for block in blocks for token in block]
    return BlockKeys(hashing or BlockHash(2), tokens, salt)[len(blocks) - 1]


def add(index: PrefixIndex, block: int, blocks: Blocks, parent: Link | None = None, salt=None) -> Entry:
    return index.add(index.root(salt) if parent is None else parent, key(blocks, salt), block)


def test_the_same_tokens_split_otherwise_are_another_prefix():
    """[1 2][3 4] after the root is not [3 4] after the root, nor [1 2] after [3 4]."""
    index = PrefixIndex()
    first = add(index, 0, [[1, 2]])
    second = add(index, 1, [[1, 2], [3, 4]], first)
    root = index.root(None)
    assert index.find(root, key([[1, 2]])) is first
    assert index.find(first, key([[1, 2], [3, 4]])) is second
    assert index.find(root, key([[3, 4]])) is None
    assert index.find(second, key([[1, 2], [3, 4], [1, 2]])) is None
    assert index.find(first, key([[1, 2], [1, 2]])) is None


@pytest.mark.parametrize(("owner", "guest"), [(None, ""), ("", None), ("a", None), ("a", "b"), ("a", "a\0")])
def test_salts_isolate(owner, guest):
    index = PrefixIndex()
    entry = add(index, 0, [[1, 2]], salt=owner)
    assert index.find(index.root(owner), key([[1, 2]], owner)) is entry
    assert index.find(index.root(guest), key([[1, 2]], guest)) is None


@pytest.mark.parametrize("salt", [None, "a"])
def test_a_colliding_hash_never_gives_a_wrong_hit(salt):
    """Every digest is the same: tokens, salt and parent still tell blocks apart."""
    index, same = PrefixIndex(), BlockHash(2, function=constant)
    entry = index.add(index.root(salt), key([[1, 2]], salt, same), 0)
    assert index.find(index.root(salt), key([[1, 2]], salt, same)) is entry
    assert index.find(index.root(salt), key([[2, 1]], salt, same)) is None
    assert index.find(index.root("other"), key([[1, 2]], "other", same)) is None
    assert index.find(entry, key([[1, 2], [1, 2]], salt, same)) is None


def test_a_parent_that_came_back_is_another_parent():
    index = PrefixIndex()
    first = add(index, 0, [[1, 2]])
    add(index, 1, [[1, 2], [3, 4]], first)
    index.remove(0)
    assert not index.is_live(first)
    again = add(index, 2, [[1, 2]])
    assert again.digest == first.digest
    assert index.find(again, key([[1, 2], [3, 4]])) is None


def test_clear_ends_every_chain():
    index = PrefixIndex()
    root, entry = index.root(None), add(index, 0, [[1, 2]])
    index.clear()
    assert (len(index), 0 in index, list(index)) == (0, False, [])
    assert not index.is_live(root)
    assert not index.is_live(entry)
    assert index.is_live(index.root(None))


def test_refuses_to_overwrite_an_entry():
    index = PrefixIndex()
    add(index, 0, [[1, 2]])
    with pytest.raises(AssertionError, match="key leads to another block"):
        add(index, 1, [[1, 2]])
    with pytest.raises(AssertionError, match="indexed already"):
        add(index, 0, [[3, 4]])
    index.check()
