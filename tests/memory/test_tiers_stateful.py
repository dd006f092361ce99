"""Any order of operations and of transfers' ends leaves pool, host and file holding what they say."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from .tiers_world import TiersWorld

TEXTS = ([0] * 14, [0, 1] * 7, [0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1])
TOKENS = st.builds(lambda text, cut: TEXTS[text][:cut], st.integers(0, 2), st.integers(1, 14))
PICK = st.integers(0, 7)


class TiersMachine(RuleBasedStateMachine):
    """Sequences are added, begin, grow, fork, end, lose blocks, give way and come back; stores and loads
    end well or not, whenever they like."""

    world: TiersWorld

    @initialize(
        num_blocks=st.integers(4, 16),
        size=st.integers(1, 3),
        slots=st.integers(1, 20),
        disk=st.sampled_from([0, 4, 30]),
        store_after=st.sampled_from([1, 1, 2]),
        decoded=st.booleans(),
        races=st.booleans(),
    )
    def build(self, num_blocks, size, slots, disk, store_after, decoded, races):
        self.world = TiersWorld(
            num_blocks,
            size,
            num_host_slots=slots,
            max_parked=max(1, slots // 2),
            num_disk_slots=disk,
            store_after=store_after,
            store_decoded=decoded,
            races=races,
        )

    @rule(tokens=TOKENS, salt=st.sampled_from([None, None, "a"]))
    def ask(self, tokens, salt):
        self.world.ask(tokens, salt)

    @rule(number=PICK)
    def admit(self, number):
        self.world.admit(number)

    @rule(tokens=TOKENS)
    def ask_and_admit(self, tokens):
        self.world.ask(tokens, None)
        self.world.now += 20.0
        self.world.admit(-1)

    @rule(number=PICK, num_tokens=st.integers(1, 5))
    def grow(self, number, num_tokens):
        self.world.grow(number, num_tokens)

    @rule(num_tokens=st.integers(1, 9), fails=st.sampled_from([False, False, False, True]))
    def grow_all(self, num_tokens, fails):
        for number in range(len(self.world.live)):
            self.world.grow(number, num_tokens)
        self.world.step(store_fails=fails)

    @rule(number=PICK)
    def fork(self, number):
        self.world.fork(number)

    @rule(number=PICK)
    def free(self, number):
        self.world.free(number)

    @rule(number=PICK, index=PICK)
    def evict(self, number, index):
        self.world.evict(number, index)

    @rule(number=PICK)
    def park(self, number):
        self.world.park(number)

    @rule(number=PICK)
    def resume(self, number):
        self.world.resume(number)

    @rule(number=PICK)
    def give_up(self, number):
        self.world.give_up(number)

    @rule(number=PICK, outcome=st.sampled_from(["ok", "ok", "ok", "failed"]))
    def finish_transfer(self, number, outcome):
        self.world.finish_transfer(number, outcome)

    @rule(outcome=st.sampled_from(["ok", "ok", "ok", "failed"]))
    def finish_all(self, outcome):
        for _ in range(20):
            self.world.finish_transfer(0, outcome)

    @rule(fails=st.sampled_from([False, False, False, True]))
    def step(self, fails):
        self.world.step(store_fails=fails)

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def time_passes(self, seconds):
        self.world.now += seconds

    @rule(certain=st.integers(0, 9))
    def reset(self, certain):
        if certain == 0:
            self.world.reset()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


def test_any_order_of_operations():
    run_state_machine_as_test(
        TiersMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_long_walks(first):
    """The same, longer, by chance of fixed seeds: with hits, loads, and sequences that come back."""
    seen = Counter[str]()
    for seed in range(first, first + 10):
        world = _walk(Random(seed), 1500)
        world.finish()
        for name in ("num_hits", "num_loads", "num_back"):
            seen[name] += getattr(world, name)
    assert min(seen[name] for name in ("num_hits", "num_loads", "num_back")) > 5


def _walk(random: Random, num_operations: int) -> TiersWorld:
    slots = random.choice((4, 12, 30))
    world = TiersWorld(
        random.choice((6, 12, 20)),
        random.choice((1, 2, 3)),
        num_host_slots=slots,
        max_parked=max(1, slots // 2),
        num_disk_slots=random.choice((0, 6, 40)),
        store_after=random.choice((1, 1, 2)),
        store_decoded=random.random() < 0.7,
        races=random.random() < 0.3,
    )
    for _ in range(num_operations):
        number, what = random.randrange(8), random.random()
        if what < 0.15:
            world.ask(TEXTS[number % 3][: random.randrange(1, 15)], random.choice((None, None, "a")))
        elif what < 0.3:
            world.admit(number)
        elif what < 0.5:
            for place in range(len(world.live)):
                world.grow(place, random.randrange(1, 6))
            world.step(store_fails=random.random() < 0.1)
        elif what < 0.7:
            world.finish_transfer(number, "failed" if random.random() < 0.1 else "ok")
        elif what < 0.71:
            world.reset()
        elif what < 0.75:
            world.now += random.choice((1.0, 20.0))
        elif what < 0.8:
            world.grow(number, random.randrange(1, 6))
        elif what < 0.83:
            world.evict(number, random.randrange(8))
        elif what < 0.85:  # a begun block is copied for one that gives way at once, and comes back
            world.fork(number)
            world.grow(-1, random.randrange(1, 6))
            world.park(-1)
            if random.random() < 0.3:
                world.resume(-1)
                world.free(random.randrange(8))
        else:
            some = world.fork, world.free, world.free, world.park, world.resume, world.give_up
            random.choice(some)(number)
    return world
