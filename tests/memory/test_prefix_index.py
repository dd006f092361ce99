from __future__ import annotations

import hashlib
import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvreclaim.memory import BlockKeys, CompactionPlan, MemoryManager
from kvreclaim.memory.prefix.index import BlockHash, BlockKey, Entry, Link, PrefixIndex
from kvreclaim.schedule.budget.compaction import plan_compaction

from .sequences import fork, write

Blocks = list[list[int]]


def constant(message: bytes) -> bytes:
    return b"same"


def key(blocks: Blocks, salt: str | None = None, hashing: BlockHash | None = None) -> BlockKey:
    """Return the key of the last of these blocks of two tokens."""
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


SIZE = 2


@given(st.data())
def test_it_names_the_first_pass_that_would_lack_blocks(data):
    memory = MemoryManager(data.draw(st.integers(4, 24), label="blocks"), SIZE)
    for number in range(data.draw(st.integers(1, 6), label="sequences")):
        fork = number and data.draw(st.booleans(), label="fork")
        if fork:
            parent = data.draw(st.integers(0, number - 1), label="parent")
            tokens = memory.table(parent).keys
            memory.fork(parent, number, tokens.fork(list(range(100))))
            continue
        keys = memory.keys(list(range(100)), data.draw(st.sampled_from((None, "other")), label="salt"))
        most = data.draw(st.integers(0, 12), label="hit")
        memory.admit(number, memory.match_prefix(keys, max_tokens=most))
        _grow(memory, number, data.draw(st.integers(0, 14), label="tokens"))
        memory.release_copy_sources()
    for seq_id in list(memory._tables):  # copies that are not settled yet
        _grow(memory, seq_id, data.draw(st.integers(0, 3), label="more"))
    lengths = {seq_id: table.physical_len for seq_id, table in memory._tables.items()}
    order = data.draw(st.permutations([seq_id for seq_id, n in lengths.items() if n]), label="order")
    passes = [(seq_id, data.draw(st.integers(0, lengths[seq_id]), label="keep")) for seq_id in order]
    unsure = set(data.draw(st.lists(st.sampled_from(order)), label="unsure")) if order else set()
    come = [each for each in passes if each[0] not in unsure or data.draw(st.booleans(), label="comes")]
    predicted, surely = memory.first_lacking(iter(passes)), memory.first_lacking(iter(passes), unsure)
    memory.release_copy_sources()
    if unsure and surely is None:
        assert _carried_out(memory, come) is None
    else:
        assert predicted == _carried_out(memory, passes)


def _grow(memory, seq_id, num_tokens):
    num_tokens = min(num_tokens, 100 - memory.table(seq_id).logical_len)
    while not memory.can_grow(seq_id, num_tokens):
        num_tokens -= 1
    if num_tokens > 0:
        memory.grow(seq_id, num_tokens)
        memory.commit(seq_id, num_tokens)


def _carried_out(memory, passes):
    """Which one was the first to lack blocks."""
    for seq_id, keep in passes:
        plan = plan_compaction(seq_id, memory.table_state(seq_id), keep, SIZE, memory.num_free)
        if plan is None:
            return seq_id
        memory.shrink(plan)
        memory.check()
    return None


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
    """Pinned: what stores these digests (offload tiers) must read them back tomorrow."""
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


def test_keys_grow_with_the_tokens_and_are_the_same_in_any_order_of_access():
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
