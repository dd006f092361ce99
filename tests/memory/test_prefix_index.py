from __future__ import annotations

import pytest

from kvreclaim.memory import BlockKeys
from kvreclaim.memory.prefix.index import BlockHash, BlockKey, Entry, Link, PrefixIndex

Blocks = list[list[int]]


def constant(message: bytes) -> bytes:
    return b"same"


def key(blocks: Blocks, salt: str | None = None, hashing: BlockHash | None = None) -> BlockKey:
    """Of the last of these blocks of two tokens."""
    tokens = [token for block in blocks for token in block]
    return BlockKeys(hashing or BlockHash(2), tokens, salt)[len(blocks) - 1]


def add(index: PrefixIndex, block: int, blocks: Blocks, parent: Link | None = None, salt=None) -> Entry:
    return index.add(index.root(salt) if parent is None else parent, key(blocks, salt), block)


@pytest.mark.parametrize("salt", [None, "a"])
def test_a_colliding_hash_never_gives_a_wrong_hit(salt):
    """Every digest is the same: tokens, salt and parent still tell blocks apart."""
    index, same = PrefixIndex(), BlockHash(2, function=constant)
    entry = index.add(index.root(salt), key([[1, 2]], salt, same), 0)
    assert index.find(index.root(salt), key([[1, 2]], salt, same)) is entry
    assert index.find(index.root(salt), key([[2, 1]], salt, same)) is None
    assert index.find(index.root("other"), key([[1, 2]], "other", same)) is None
    assert index.find(entry, key([[1, 2], [1, 2]], salt, same)) is None


def test_refuses_to_overwrite_an_entry():
    index = PrefixIndex()
    add(index, 0, [[1, 2]])
    with pytest.raises(AssertionError, match="key leads to another block"):
        add(index, 1, [[1, 2]])
    with pytest.raises(AssertionError, match="indexed already"):
        add(index, 0, [[3, 4]])
    index.check()
