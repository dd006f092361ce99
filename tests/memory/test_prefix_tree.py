"""The index as a radix tree, against all prefixes that the index finds."""

from __future__ import annotations

import inspect
import sys
from random import Random

import pytest

from kvreclaim.memory import MemoryManager
from kvreclaim.memory.prefix.tree import PrefixNode, prefix_tree

SIZE = 4


def begin(memory: MemoryManager, seq_id: int, tokens: list[int], salt: str | None = None) -> None:
    keys = memory.keys(tokens, salt)
    match = memory.match_prefix(keys)
    memory.admit(seq_id, match)
    memory.grow(seq_id, len(tokens) - match.num_tokens)
    memory.commit(seq_id, len(tokens) - match.num_tokens)


def holders(memory: MemoryManager, running: list[int]) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for seq_id in running:
        for block in memory.table(seq_id).blocks():
            found[block] = (*found.get(block, ()), str(seq_id))
    return found


def tree(memory: MemoryManager, *running: int) -> tuple[PrefixNode, ...]:
    return prefix_tree(memory.pool.index, holders(memory, list(running)))


def paths(nodes: tuple[PrefixNode, ...], above: tuple[int, ...] = ()) -> dict[tuple, int]:
    """(salt, tokens from the root down) of each block, and the block."""
    found = {}
    for node in nodes:
        assert len(node.token_ids) == SIZE * len(node.blocks)
        for place, block in enumerate(node.blocks):
            found[node.salt, above + node.token_ids[: SIZE * (place + 1)]] = block
        found |= paths(node.children, above + node.token_ids)
    return found


def test_by_hand() -> None:
    memory = MemoryManager(100, SIZE)
    for seq_id, tokens in enumerate(([1] * 16, [1] * 8 + [2] * 8, [1] * 8 + [2] * 8 + [3] * 4, [9] * 3)):
        begin(memory, seq_id, tokens)
    begin(memory, 4, [1] * 8, "a")
    memory.free(2)
    top, salted = tree(memory, 0, 1, 3, 4)
    assert (top.num_tokens, top.holders, top.salt) == (8, ("0", "1"), None)
    assert (salted.token_ids, salted.holders, salted.salt) == ((1,) * 8, ("4",), "a")
    first, second = top.children
    assert (first.token_ids, first.holders, first.children) == ((1,) * 8, ("0",), ())
    assert (second.token_ids, second.holders) == ((2,) * 8, ("1",))
    (third,) = second.children
    assert (third.token_ids, third.holders) == ((3,) * 4, ())
    assert top.lines() == [
        "8 tokens, 2 blocks, 2 running",
        "  8 tokens, 2 blocks, 1 running",
        "  8 tokens, 2 blocks, 1 running",
        "    4 tokens, 1 blocks, cached",
    ]


def test_an_empty_index_has_no_tree() -> None:
    memory = MemoryManager(10, SIZE)
    assert tree(memory) == ()
    begin(memory, 0, [1] * 9)
    memory.reset_prefix_cache()
    assert tree(memory, 0) == ()


def test_what_no_walk_reaches_is_left_out() -> None:
    memory = MemoryManager(10, SIZE)
    begin(memory, 0, [1] * 12)
    memory.pool.unindex(memory.table(0).block_ids[1])
    (top,) = tree(memory, 0)
    assert top.num_tokens == SIZE
    assert len(memory.pool.index) == 2


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_holds_what_can_be_found(seed: int) -> None:
    random = Random(seed)
    memory, running, asked = MemoryManager(60, SIZE), [], set()
    for seq_id in range(60):
        tokens = [random.randrange(2) for _ in range(random.randrange(1, 5)) for _ in range(SIZE)]
        salt = random.choice((None, "", "a"))
        asked |= {(salt, tuple(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)}
        begin(memory, seq_id, tokens, salt)
        running.append(seq_id)
        if len(running) > 6:
            memory.free(running.pop(random.randrange(len(running))))
    found = paths(tree(memory, *running))
    for salt, tokens in asked:
        match = memory.match_prefix(memory.keys([*tokens, 0], salt))
        there = match.num_tokens == len(tokens)
        assert ((salt, tokens) in found) == there
        if there:
            assert found[salt, tokens] == match.block_ids[-1]
    assert found.keys() <= asked


def test_runs_are_as_long_as_can_be() -> None:
    """A node has one child only where others hold it."""
    random = Random(1)
    memory = MemoryManager(200, SIZE)
    for seq_id in range(30):
        begin(memory, seq_id, [random.randrange(2) for _ in range(20)])
    running = list(range(30))
    stack = list(tree(memory, *running))
    assert stack
    while stack:
        node = stack.pop()
        if len(node.children) == 1:
            assert node.children[0].holders != node.holders
        stack += node.children


def test_a_long_conversation_is_no_deep_recursion() -> None:
    memory = MemoryManager(1000, SIZE)
    tokens: list[int] = []
    for turn in range(300):
        tokens += [turn] * SIZE
        begin(memory, turn, [*tokens, 9])
        begin(memory, 10_000 + turn, [*tokens, *[7777] * SIZE])
        memory.free(turn)
        memory.free(10_000 + turn)
    allowed = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        (top,) = tree(memory)
    finally:
        sys.setrecursionlimit(allowed)
    depth = 0
    while top.children:
        top, depth = max(top.children, key=lambda node: len(node.children)), depth + 1
    assert depth >= 299
