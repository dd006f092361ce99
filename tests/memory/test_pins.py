from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory import MemoryManager, Retention
from kvreclaim.memory.blocks import PINNED
from kvreclaim.memory.pins import ttls

from .sequences import find, run


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def memory_of(num_blocks: int, fraction: float = 0.5, **options) -> tuple[MemoryManager, Clock]:
    clock = Clock()
    return MemoryManager(num_blocks, 4, max_pinned_fraction=fraction, clock=clock, **options), clock


def serve(memory: MemoryManager, seq_id: int, tokens, *retention: Retention, salt: str | None = None) -> int:
    """A request comes, is pinned and ends. Returns: tokens that were hit."""
    hit = run(memory, seq_id, tokens, salt)
    memory.pin(seq_id, retention)
    memory.free(seq_id)
    memory.check()
    return hit


def hits(memory: MemoryManager, tokens, salt: str | None = None) -> int:
    return find(memory, tokens, salt=salt).num_tokens


PINNED_PROMPT, OTHER, THIRD = range(9), range(100, 109), range(200, 209)


def test_an_expired_pin_leaves_the_order_as_if_it_had_never_been():
    """The oldest block is passed over twice while it is pinned, and is the very next one after that."""
    memory, clock = memory_of(6)
    serve(memory, 0, range(5), Retention(4, 60))
    serve(memory, 1, OTHER)
    serve(memory, 2, range(300, 308))
    assert hits(memory, OTHER) == 8
    clock.now += 59.9
    serve(memory, 3, range(400, 404))
    assert (hits(memory, range(5)), hits(memory, OTHER)) == (4, 8)
    clock.now += 0.2
    serve(memory, 4, range(500, 504))
    assert (hits(memory, range(5)), hits(memory, OTHER)) == (0, 8)


def test_time_runs_while_a_block_is_in_use_and_begins_anew_at_a_hit():
    memory, clock = memory_of(8)
    serve(memory, 0, PINNED_PROMPT, Retention(8, 60))
    clock.now += 50
    run(memory, 1, range(5))
    clock.now += 50
    assert memory.stats().pinned == 1, "the first block was hit, the second was not"
    memory.free(1)
    clock.now += 10
    assert memory.stats().pinned == 0
    serve(memory, 2, PINNED_PROMPT)
    assert memory.stats().pinned == 0, "a hit revives no pin that is over"


def test_a_match_alone_refreshes_nothing():
    memory, clock = memory_of(8)
    serve(memory, 0, PINNED_PROMPT, Retention(8, 60))
    clock.now += 50
    assert hits(memory, PINNED_PROMPT) == 8
    clock.now += 10
    assert memory.stats().pinned == 0


@pytest.mark.parametrize("first", [60, 300])
def test_of_two_pins_the_longer_holds(first):
    memory, clock = memory_of(8)
    serve(memory, 0, PINNED_PROMPT, Retention(8, first))
    serve(memory, 1, PINNED_PROMPT, Retention(8, 360 - first))
    clock.now += 299
    assert memory.stats().pinned == 2
    assert serve(memory, 2, PINNED_PROMPT) == 8
    clock.now += 299
    assert memory.stats().pinned == 2
    clock.now += 1
    assert memory.stats().pinned == 0


def test_more_than_the_budget_is_refused_from_the_end_and_counted():
    memory, clock = memory_of(10, 0.45)
    serve(memory, 0, range(25), Retention(24, 60))
    stats = memory.stats()
    assert (stats.pinned, stats.pins_refused) == (4, 2)
    memory.pin(run_and_keep(memory, 1, OTHER), [Retention(8, 60)])
    stats = memory.stats()
    assert (stats.pinned, stats.pins_refused) == (4, 4)
    assert run(memory, 2, range(25)) == 24, "a request whose pin was refused has been served and cached"
    clock.now += 60
    memory.pin(1, [Retention(8, 60)])
    assert (memory.stats().pinned, memory.stats().pins_refused) == (2, 4)


def test_one_owner_uses_all_of_the_budget_until_another_wants_its_part():
    memory, _ = memory_of(50, 0.2)

    def pinned(seq_id: int, first: int, owner: str | None) -> tuple[int, int]:
        """Blocks of five that are pinned then, of this chain and of all."""
        memory.pin(run_and_keep(memory, seq_id, range(first, first + 21)), [Retention(20, 60)], owner)
        memory.check()
        own = sum(memory.pool.marks[block] & PINNED > 0 for block in memory.table(seq_id).block_ids)
        return own, memory.stats().pinned

    assert pinned(0, 0, "a") == (5, 5)
    assert pinned(1, 100, "a") == (5, 10)
    assert pinned(2, 200, "a") == (0, 10)
    assert memory.stats().pins_refused == 5
    assert pinned(3, 300, "b") == (5, 10)
    assert memory.stats().pins_refused == 10, "those that gave way"
    marks = memory.pool.marks
    assert [marks[block] & PINNED > 0 for block in memory.table(0).blocks()] == [True] * 5 + [False]
    assert not any(marks[block] & PINNED for block in memory.table(1).blocks())
    assert pinned(4, 400, "c") == (3, 10)
    assert pinned(5, 500, "b") == (0, 10)
    assert pinned(6, 600, None) == (2, 10), "a third of ten, then a quarter"


def run_and_keep(memory: MemoryManager, seq_id: int, tokens) -> int:
    run(memory, seq_id, tokens)
    return seq_id


@pytest.mark.parametrize(("fraction", "most"), [(0, 0), (0.34, 3), (0.5, 5), (1, 10)])
def test_the_budget_is_a_part_of_the_pool(fraction, most):
    memory, _ = memory_of(10, fraction)
    serve(memory, 0, range(40), Retention(40, 60))
    assert memory.stats().pinned == most
    assert memory.stats().pins_refused == 10 - most


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "half", True])
def test_a_budget_that_is_none_is_refused(fraction):
    with pytest.raises(InvalidArgumentError, match=r"max_pinned_fraction is .* from 0 to 1"):
        memory_of(10, fraction)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9))), st.integers(1, 5))
def test_retentions_against_a_loop(retention, size):
    per_block = [
        max(covering)
        for i in range(50)
        if (covering := [ttl for num_tokens, ttl in retention if num_tokens >= (i + 1) * size])
    ]
    assert list(ttls([Retention(*kept) for kept in retention], size)) == per_block


@pytest.mark.parametrize(
    ("num_tokens", "ttl_s", "what"),
    [
        (-1, 60, "num_tokens of a retention is -1"),
        (1.5, 60, "num_tokens of a retention is 1.5"),
        (8, 0, "ttl_s of a retention is 0"),
        (8, float("inf"), "ttl_s of a retention is inf"),
        (8, float("nan"), "ttl_s of a retention is nan"),
        (8, "5m", "ttl_s of a retention is '5m'"),
    ],
)
def test_a_retention_that_makes_no_sense_is_refused(num_tokens, ttl_s, what):
    with pytest.raises(InvalidArgumentError, match=what):
        Retention(num_tokens, ttl_s)


def test_no_tenant_starves_beside_one_that_pins_everything():
    """The other's five blocks are found again and again in the half that cannot be pinned."""
    memory, clock = memory_of(32)
    for turn in range(50):
        clock.now += 1
        serve(memory, 2 * turn, range(1000 * turn, 1000 * turn + 40), Retention(40, 3600), salt="greedy")
        hit = serve(memory, 2 * turn + 1, range(21), salt="other")
        assert hit == (20 if turn else 0)
    stats = memory.stats()
    assert stats.pinned == 16
    assert stats.pins_refused > 300
    assert stats.in_use == 0


def test_memory_of_pins_is_bounded():
    """A thousand refreshes of the same pins leave no trace."""
    memory, clock = memory_of(8)
    for turn in range(1000):
        clock.now += 1
        serve(memory, turn, PINNED_PROMPT, Retention(8, 60))
    pins = memory.pool.pins
    assert len(pins._ends._items) <= 2 * 2 + 64
    assert (len(pins), len(pins.aside)) == (2, 0)
