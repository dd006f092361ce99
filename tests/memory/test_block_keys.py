"""What a block's key is, and that it is computed once in a sequence's life."""

from __future__ import annotations

import hashlib
import struct

import pytest

from kvreclaim.memory import BlockKeys, CompactionPlan, MemoryManager
from kvreclaim.memory.prefix.index import BlockHash

from .sequences import fork, write


class Counted:
    """sha256 that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, message: bytes) -> bytes:
        self.calls += 1
        return hashlib.sha256(message).digest()

    def since(self) -> int:
        """Calls since the last time."""
        calls, self.calls = self.calls, 0
        return calls


def test_the_key_is_sha256_over_typed_length_prefixed_fields():
    """Pinned: whoever stores these digests (offload tiers) must read them back tomorrow."""
    root = b"f" + struct.pack("<Q", 5) + b"model" + b"s" + struct.pack("<Q", 2) + b"me"
    digest = hashlib.sha256(root).digest()
    keys = BlockKeys(BlockHash(2, "model"), [7, -1, 3, 4, 5], "me")
    for i, tokens in enumerate(([7, -1], [3, 4])):
        packed = struct.pack("<qq", *tokens)
        block = b"p" + struct.pack("<Q", 32) + digest + b"t" + struct.pack("<Q", 16) + packed
        digest = hashlib.sha256(block).digest()
        assert keys[i] == (digest, packed)


def test_salts_and_fingerprints_give_different_roots():
    salts = [None, "", "None", "n", "s", "\0", "é", "\ud800"]
    pairs = [("", salt) for salt in salts] + [("m", None), ("m", ""), ("mn", None), ("", "m"), ("ms", "")]
    digests = {BlockHash(4, fingerprint).root(salt) for fingerprint, salt in pairs}
    assert len(digests) == len(pairs)


@pytest.mark.parametrize(
    ("one", "other"),
    [([1, 23], [12, 3]), ([1, 1], [1, 257]), ([0, 1], [1, 0]), ([1, 0], [256, 0]), ([-1, 0], [2**63 - 1, 0])],
)
def test_tokens_do_not_run_together(one, other):
    assert BlockKeys(BlockHash(2), one)[0].digest != BlockKeys(BlockHash(2), other)[0].digest


def test_a_block_is_packed_whole():
    with pytest.raises(struct.error):
        BlockKeys(BlockHash(2), [1])[0]


def test_keys_grow_with_the_tokens_and_are_the_same_in_any_order_of_asking():
    tokens = list(range(5))
    keys, hashed = BlockKeys(BlockHash(2), tokens), Counted()
    first = keys[0]
    tokens += range(5, 9)
    late = BlockKeys(BlockHash(2, function=hashed), tokens)
    assert keys.num_tokens == 9
    assert [late[i] for i in (3, 0, 2, 1)] == [keys[i] for i in (3, 0, 2, 1)]
    assert late[0] == first
    assert hashed.since() == 5, "a root and four blocks"


def test_a_fork_goes_its_own_way():
    hashed, tokens = Counted(), list(range(4))
    parent = BlockKeys(BlockHash(2, function=hashed), tokens, "salt")
    assert parent[1]
    child_tokens = tokens.copy()
    child = parent.fork(child_tokens)
    hashed.since()
    tokens += [4, 5]
    child_tokens += [6, 7]
    assert (child.salt, child[1]) == ("salt", parent[1])
    assert hashed.since() == 0, "what the parent knew"
    assert child[2] != parent[2]
    assert child[2] == BlockKeys(BlockHash(2), child_tokens, "salt")[2]


def test_a_long_prompt_is_hashed_once_in_its_life():
    """Matched while it waits, admitted, computed in chunks, forked, preempted, admitted again."""
    size, num_tokens = 16, 32_768
    hashed, tokens = Counted(), list(range(num_tokens))
    memory = MemoryManager(3 * num_tokens // size, size, hash_function=hashed)
    keys = memory.keys(tokens)
    match = memory.match_prefix(keys)
    assert (match.num_tokens, hashed.since()) == (0, 2), "the root and the first block, which is not there"
    for _ in range(5):
        memory.match_prefix(keys)
    memory.admit(0, match)
    assert hashed.since() == 0
    while (done := memory.table(0).physical_len) < num_tokens:
        memory.grow(0, 2048)
        memory.commit(0, 2048)
        assert hashed.since() == 2048 // size - (done == 0)
    fork(memory, 0, 1)
    memory.free(0)
    memory.free(1)
    match = memory.match_prefix(keys)
    assert match.num_tokens == num_tokens - size
    memory.admit(0, match)
    write(memory, 0, tokens[match.num_tokens :])
    memory.free(0)
    memory.reset_prefix_cache()
    memory.admit(0, memory.match_prefix(keys))
    write(memory, 0, tokens)
    assert memory.indexed_len(0) == num_tokens, "entered anew, under the same keys"
    assert hashed.since() == 0


def test_a_waiting_prompt_costs_no_hash_per_step():
    hashed = Counted()
    memory = MemoryManager(20, 4, hash_function=hashed)
    warm = memory.keys(list(range(40)))
    memory.admit(0, memory.match_prefix(warm))
    write(memory, 0, list(range(40)))
    waiting = memory.keys([*range(40), *range(90, 130)])
    hashed.since()
    assert memory.match_prefix(waiting).num_tokens == 40
    assert hashed.since() == 12, "the root, ten that are found, the first that is not"
    for _ in range(10):
        match = memory.match_prefix(waiting)
        assert not memory.can_admit(match, 90)
        write(memory, 0, [7])
    assert hashed.since() == 2, "the two blocks that the running sequence filled"


def test_what_never_enters_the_index_is_not_hashed():
    hashed = Counted()
    for caching in (True, False):
        memory = MemoryManager(20, 4, enable_prefix_caching=caching, hash_function=hashed)
        memory.admit(0, memory.match_prefix(memory.keys(list(range(8)))))
        write(memory, 0, list(range(8)))
        assert hashed.since() == (3 if caching else 0)
        memory.shrink(CompactionPlan(0, 3, (None,)))
        write(memory, 0, list(range(20)))
        assert hashed.since() == 0
