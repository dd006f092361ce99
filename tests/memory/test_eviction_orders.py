"""What all orders must hold to. That each does in any run of operations what its slow twin does is shown by
test_random_operations.py."""

from __future__ import annotations

import random
from importlib.metadata import EntryPoint
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvreclaim import entry_points as third_parties
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory import MemoryManager, Retention, eviction_orders, make_order
from kvreclaim.memory.eviction.lru import LRU

from .naive_orders import NAIVE
from .sequences import find, reuse_order, run


def test_the_known_orders_begin_with_the_default():
    assert eviction_orders() == ("lru", "slru", "priority")
    assert set(NAIVE) == set(eviction_orders())
    assert MemoryManager(4, 4).pool.free_queue.name == "lru"


@pytest.mark.parametrize("name", ["LRU", "", "lfu", "gdsf"])
def test_an_unknown_order_is_refused_with_the_known_ones(name):
    with pytest.raises(InvalidArgumentError, match=f"{name!r}.*known are lru, slru, priority"):
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
        assert eviction_orders()[:3] == ("lru", "slru", "priority")
        assert set(eviction_orders()[3:]) == {"newest", "number", "gone"}
        order = MemoryManager(4, 4, eviction_policy="newest").pool.free_queue
        assert type(order).__name__ == "Newest"

    def test_take_over_no_built_in_name(self):
        assert type(make_order("lru", 4)).__name__ == "LRU"

    @pytest.mark.parametrize(
        ("name", "reason"), [("number", "does not derive from EvictionOrder"), ("gone", "cannot be imported")]
    )
    def test_are_refused_if_they_are_none(self, name, reason):
        with pytest.raises(InvalidArgumentError, match=f"eviction order '{name}'.*{reason}"):
            make_order(name, 4)


class Watching(LRU):
    """What the pool reports of cached blocks."""

    watches = True

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.calls: list[tuple[object, ...]] = []

    def entered(self, block: int, priority: int) -> None:
        self.calls.append(("entered", block, priority))

    def used(self, block: int, priority: int) -> None:
        self.calls.append(("used", block, priority))

    def forgot(self, block: int) -> None:
        self.calls.append(("forgot", block))


def test_an_order_of_ones_own_is_taken_and_hears_of_cached_blocks():
    order = Watching(3)
    memory = MemoryManager(3, 1, eviction_policy=order)
    assert memory.pool.free_queue is order
    run(memory, 0, [7, 8])
    memory.free(0)
    memory.admit(1, find(memory, [7, 9]), priority=-2)
    memory.grow(1, 2)
    memory.free(1)
    memory.reset_prefix_cache()
    assert order.calls == [
        ("entered", 0, 0),
        ("entered", 1, 0),
        ("used", 0, -2),
        ("forgot", 1),
        ("forgot", 0),
    ]


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
