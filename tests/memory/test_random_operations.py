"""Thousands of operations from a seed, each with a shadow, then everything ends: no block is lost. Their cost
in executed lines is the same in a small pool and in one a thousand times as large."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest

from kvreclaim.memory import CompactionPlan, MemoryManager, Retention, eviction_orders

from .sequences import find
from .world import World

COUNTS = (
    "prefix_hit_tokens",
    "prefix_evictions",
    "blocks_freed_by_compression",
    "cow_copies",
    "pins_refused",
)
OTHERS = [name for name in eviction_orders() if name != "lru"]
WEIGHTS = {
    "admit": 20,
    "again": 12,
    "branch": 6,
    "extend": 40,
    "grow": 3,
    "abort": 3,
    "fork": 6,
    "shrink": 8,
    "drop": 3,
    "mark_inexact": 1,
    "preempt": 4,
    "finish": 25,
    "pin": 6,
    "wait": 6,
    "reset": 0.1,
}


def some_tokens(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(3) for _ in range(rng.randrange(most + 1))]


def one_operation(world: World, rng: random.Random, past: list[list[int]]) -> str:
    """Returns: what was done; "full" if there was no room for it."""
    live = world.live
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    salt = rng.choice([None, None, None, "tenant"])
    if kind == "admit" or not live:
        tokens = some_tokens(rng, min(39, world.shadow.num_blocks * world.shadow.block_size))
        limit = rng.choice([None] * 9 + [rng.randrange(10)])
        return "admit" if world.start(tokens, salt, limit, rng.randrange(3)) is not None else "full"
    seq_id = rng.choice(live)
    sequence = world.shadow.sequences[seq_id]
    if kind == "again":
        tokens = rng.choice(past) if past else sequence.tokens
        return kind if world.start(tokens, salt) is not None else "full"
    if kind == "branch":
        tokens = sequence.tokens[: rng.randrange(17)] + some_tokens(rng, 9)
        return kind if world.start(tokens, rng.choice([sequence.salt, salt])) is not None else "full"
    if kind == "extend":
        room = world.extend(seq_id, [rng.randrange(3) for _ in range(rng.choice([1, 1, 1, 2, 17]))])
        if not room:
            world.preempt(live[-1])
        return kind if room else "full"
    if kind in ("grow", "abort"):
        room = world.grow(seq_id, rng.randrange(10))
        if kind == "abort":
            world.free(seq_id)
        return kind if room else "full"
    if kind == "fork":
        world.fork(seq_id)
    elif kind == "shrink":
        return kind if world.shrink(seq_id, rng) is not None else "full"
    elif kind == "drop":
        world.drop(seq_id, rng)
    elif kind == "mark_inexact":
        world.mark_inexact(seq_id)
    elif kind == "preempt":
        world.preempt(seq_id)
    elif kind == "finish":
        past[:] = [*past[-15:], sequence.tokens]
        world.free(seq_id)
    elif kind == "pin":
        kept = [(rng.randrange(40), rng.choice([5.0, 30.0])) for _ in range(rng.randrange(1, 3))]
        world.pin(seq_id, kept, rng.choice([None, "a", "b"]))
    elif kind == "wait":
        world.now += rng.choice([0.5, 4.0, 20.0])
    else:
        world.reset_prefix_cache()
    return kind


@pytest.mark.parametrize(("order", "operations"), [("lru", 10_000), *((o, 3000) for o in OTHERS)])
def test_ten_thousand_random_operations(order: str, operations: int) -> None:
    num_blocks, block_size = 48, 4
    rng, past = random.Random(20250101), []
    world = World(num_blocks, block_size, order=order, max_pinned_fraction=0.1)
    done: Counter[str] = Counter()
    for _ in range(operations):
        done[one_operation(world, rng, past)] += 1
        world.check()
    assert set(done) == {*WEIGHTS, "full"}, f"not every kind of operation occurred: {done}"
    stats = world.memory.stats()
    for what in COUNTS:
        assert getattr(stats, what) > 0, f"{what} is 0: the run did not exercise it"
    reasons = [reason for reason, tokens in stats.misses.items() if tokens]
    assert reasons == ["cold", "evicted", "salt", "sub_block", "ineligible"]
    end(world)


def end(world: World) -> None:
    """Free everything: no block is lost."""
    for seq_id in world.live:
        world.free(seq_id)
    world.check()
    stats = world.memory.stats()
    assert stats.in_use == 0
    assert stats.free + stats.cached == stats.num_blocks
    world.reset_prefix_cache()
    assert world.memory.stats().free == stats.num_blocks


def three_bits(message: bytes) -> bytes:
    """Eight digests for everything."""
    return bytes([hashlib.sha256(message).digest()[0] & 7])


def constant(message: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("seed", range(60))
def test_small_pools(seed: int) -> None:
    """Pools of any block size and order, also without caching and with hashes that collide."""
    rng, past = random.Random(seed), []
    colliding = rng.choice([None, None, None, three_bits, constant])
    world = World(
        rng.randrange(2, 25),
        rng.randrange(1, 5),
        caching=rng.random() < 0.75,
        colliding=colliding,
        order="lru" if colliding else rng.choice(eviction_orders()),
        max_pinned_fraction=rng.choice([0.0, 0.3, 0.5, 1.0]),
    )
    for _ in range(160):
        one_operation(world, rng, past)
        world.check()
    end(world)


def lines(work: Callable[[], object]) -> int:
    """Lines of the memory room that the call executes; what a garbage collection runs is not counted."""
    executed = 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable:
        nonlocal executed
        executed += event == "line" and frame.f_globals["__name__"].startswith("kvreclaim.memory")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return executed


def costs(num_blocks: int, order: str) -> list[int]:
    """Return the cost of every operation on a sequence of eight blocks, three of them pinned."""
    memory, prompt = MemoryManager(num_blocks, 4, eviction_policy=order), list(range(33))

    def admit(seq_id: int) -> None:
        memory.admit(seq_id, find(memory, prompt))

    return [
        lines(work)
        for work in (
            lambda: admit(0),
            lambda: memory.grow(0, 33),
            lambda: memory.commit(0, 33),
            lambda: memory.pin(0, [Retention(12, 60)]),
            lambda: memory.free(0),
            lambda: admit(1),
            lambda: (memory.grow(1, 1), memory.commit(1, 1)),
            lambda: memory.fork(1, 2, memory.table(1).keys.fork(prompt)),
            lambda: memory.grow(2, 5),
            lambda: memory.shrink(CompactionPlan(2, 9, (None, None, None))),
            lambda: memory.drop_blocks(1, [0, 3]),
            lambda: memory.free(1),
            lambda: memory.free(2),
            memory.stats,
        )
    ]


@pytest.mark.parametrize("order", eviction_orders())
def test_cost_does_not_depend_on_the_pool(order):
    """But for what a heap does inside, which is logarithmic."""
    assert costs(50, order) == costs(50_000, order)
