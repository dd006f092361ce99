"""Each order by hand on a few blocks, and what all of them must hold to. That each does in any run of
operations what its slow twin does is shown by test_stateful.py and test_random_operations.py."""

from __future__ import annotations

import random
from importlib.metadata import EntryPoint
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvreclaim import entry_points as third_parties
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory import EvictionOrder, MemoryManager, Retention, eviction_orders, make_order
from kvreclaim.memory.eviction.lru import LRU

from .naive_orders import NAIVE
from .sequences import find, reuse_order, run


def test_the_known_orders_begin_with_the_default():
    assert eviction_orders() == ("lru", "slru", "lfu", "priority", "gdsf")
    assert set(NAIVE) == set(eviction_orders())
    assert MemoryManager(4, 4).pool.free_queue.name == "lru"


@pytest.mark.parametrize("name", ["LRU", "", "fifo"])
def test_an_unknown_order_is_refused_with_the_known_ones(name):
    with pytest.raises(InvalidArgumentError, match=f"{name!r}.*known are lru, slru, lfu, priority, gdsf"):
        MemoryManager(4, 4, eviction_policy=name)


class Newest(LRU):
    """A third party's order."""

    name = "newest"


class TestThirdParties:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch):
        group = "kvreclaim.eviction_orders"
        points = [
            EntryPoint("newest", f"{__name__}:Newest", group),
            EntryPoint("lru", f"{__name__}:Newest", group),
            EntryPoint("number", "builtins:int", group),
            EntryPoint("gone", "no_such_module:Order", group),
        ]

        def installed(group):
            return [point for point in points if point.group == group]

        monkeypatch.setattr(third_parties, "installed", installed)

    def test_are_found_and_listed_behind_the_built_in_ones(self):
        assert eviction_orders()[:5] == ("lru", "slru", "lfu", "priority", "gdsf")
        assert set(eviction_orders()[5:]) == {"newest", "number", "gone"}
        order = MemoryManager(4, 4, eviction_policy="newest").pool.free_queue
        assert type(order).__name__ == "Newest"

    def test_take_over_no_built_in_name(self):
        assert type(make_order("lru", 4, 4)).__name__ == "LRU"

    @pytest.mark.parametrize(
        ("name", "reason"), [("number", "does not derive from EvictionOrder"), ("gone", "cannot be imported")]
    )
    def test_are_refused_if_they_are_none(self, name, reason):
        with pytest.raises(InvalidArgumentError, match=f"eviction order '{name}'.*{reason}"):
            make_order(name, 4, 4)


def test_an_order_of_ones_own_is_taken():
    order = make_order("lfu", 4, 4)
    assert MemoryManager(4, 4, eviction_policy=order).pool.free_queue is order


def cached(name: str, lengths: list[int], num_blocks: int = 10) -> tuple[EvictionOrder, list[list[int]]]:
    """An order with chains of these lengths in use, of blocks of one slot."""
    order = make_order(name, num_blocks, 1)
    chains = [[order.pop() for _ in range(length)] for length in lengths]
    for chain in chains:
        for i, block in enumerate(chain):
            order.entered(block, chain[i - 1] if i else None, 0)
    return order, chains


def release(order: EvictionOrder, chain: list[int]) -> None:
    for block in reversed(chain):
        order.push(block)
        order.check()


def hit(order: EvictionOrder, blocks: list[int], priority: int = 0) -> None:
    for block in blocks:
        order.remove(block)
    for block in blocks:
        order.used(block, priority)
    release(order, blocks)


def test_gdsf_by_hand():
    """Blocks of 8,192 slots: the third of a chain costs twice the first, 1, 1.5, 2."""
    order = make_order("gdsf", 8, 8192)
    chain = [order.pop() for _ in range(3)]
    for i, block in enumerate(chain):
        order.entered(block, chain[i - 1] if i else None, 0)
    single = order.pop()
    order.entered(single, None, 0)
    release(order, chain)
    order.push(single)
    assert list(order) == [4, 5, 6, 7, 3, 2, 1, 0], "1 each, but the chain's are worth its last block's 2"
    hit(order, [single])
    assert list(order) == [4, 5, 6, 7, 2, 1, 0, 3], "2 x 1 is a tie with the chain; it was released later"
    assert [order.pop() for _ in range(5)] == [4, 5, 6, 7, 2]
    order.reused(2)
    order.entered(4, None, 0)
    order.push(4)
    assert list(order) == [1, 0, 3, 4], "what comes now begins at the age of 2: 2 + 1"


PROMPTS = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(-2, 2)))


@pytest.mark.parametrize("name", eviction_orders())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompts=PROMPTS, num_blocks=st.integers(18, 30), seed=st.integers(0, 9))
def test_no_block_is_reused_before_those_behind_it_in_its_chain(name, prompts, num_blocks, seed):
    """Two requests run at a time, end in any order, and pin some of what they had."""
    rng, ticks = random.Random(seed), count()
    memory = MemoryManager(num_blocks, 1, eviction_policy=name, clock=lambda: next(ticks))
    live: list[int] = []
    for seq_id, (tokens, priority) in enumerate(prompts):
        if len(live) == 2:
            memory.free(live.pop(rng.randrange(2)))
        match = find(memory, tokens)
        memory.admit(seq_id, match, priority=priority)
        memory.grow(seq_id, len(tokens) - match.num_tokens)
        memory.commit(seq_id, len(tokens) - match.num_tokens)
        live.append(seq_id)
        if rng.random() < 0.5:
            memory.pin(seq_id, [Retention(rng.randrange(10), 20)])
        check_children_first(memory)
    for seq_id in live:
        memory.free(seq_id)
    check_children_first(memory)


def check_children_first(memory: MemoryManager) -> None:
    memory.check()
    cached = {entry.block: entry for entry in memory.pool.index}
    entries = [cached[block] for block in reuse_order(memory.pool) if block in cached]
    place = {entry.serial: i for i, entry in enumerate(entries)}
    for i, entry in enumerate(entries):
        assert place.get(entry.parent, i + 1) > i, f"block {entry.block} is reused after its parent"


def test_the_age_of_gdsf_is_what_was_reused_not_what_a_pin_passed_over():
    """Blocks of 4,096 slots, all pinned: the least of them, worth 1, is reused; another, worth 20, is only
    passed over. The first block of a chain is worth the 12.5 of the second, the single one 1 + 11."""
    memory = MemoryManager(8, 4096, eviction_policy="gdsf", max_pinned_fraction=1.0, clock=lambda: 0)
    chain, single, least, most = range(8193), range(10_000, 14_097), range(20_000, 24_097), range(4097, 8194)
    seq_ids = count()

    def begin(tokens: range) -> int:
        seq_id = next(seq_ids)
        run(memory, seq_id, tokens)
        memory.pin(seq_id, [Retention(8192, 60)])
        return seq_id

    for tokens, uses in (chain, 10), (single, 10), (least, 1), (most, 20):
        for _ in range(uses):
            memory.free(begin(tokens))
    held = begin(chain[:4097]), begin(single)
    first, alone = (memory.table(seq_id).blocks()[0] for seq_id in held)
    run(memory, next(seq_ids), range(30_000, 34_097))
    assert find(memory, least).num_tokens == 0, "reused"
    assert find(memory, most).num_tokens == 4096, "passed over"
    for seq_id in held:
        memory.free(seq_id)
    order = reuse_order(memory.pool)
    assert order.index(alone) < order.index(first)
