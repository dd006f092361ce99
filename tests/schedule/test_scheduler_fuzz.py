"""Random steps of the scheduler over plain lists: every block holds what its sequences must find there."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from one_tenant import OneTenant
from simulation import Ask, World

from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.scheduler import Scheduler

STEPS_PER_WORLD = 500
WORLDS_PER_PART = 50
NUM_PARTS = 4
SHARED = [Random("shared").randrange(3) for _ in range(30)]
TENANTS = ((None,), (None, "a"), ("a", "a", "a", "b"), ("a", "b", "c", "d", None))


def random_footprint(world: World) -> Footprint:
    random, size = world.random, world.size
    way = random.choice((EvictionMethod.KEEP, EvictionMethod.KEEP, *EvictionMethod))
    blocks = random.randrange(2, 4)
    return Footprint(
        eviction_method=way,
        budget=max(blocks * size, 2),
        interval=random.choice((size, size + 1, 5)),
        prompt_only=way is EvictionMethod.COMPACT and random.random() < 0.3,
        window=random.choice((1, 1, 3, None)),
        block_size=size,
        max_chunk=world.max_chunk,
    )


def random_ask(world: World, tenants: tuple[str | None, ...] = (None,)) -> Ask:
    """A prompt begins with a shared text, or with all that a running sequence holds."""
    random = world.random
    prompt = SHARED[: random.randrange(30)]
    if world.sequences and random.random() < 0.4:
        prompt = list(random.choice(list(world.sequences.values())).token_ids)
    prompt = [*prompt, *random.choices(range(3), k=random.randrange(1, 6))]
    return Ask(
        prompt=prompt,
        num_outputs=random.choice((1, 1, 1, 2, 3)),
        max_len=len(prompt) + random.randrange(1, 25),
        footprint=random_footprint(world),
        priority=random.randrange(3),
        salt=random.choice((None, None, "", "a")),
        tenant=random.choice(tenants),
        guilty=random.random() < 0.03,
    )


def run_world(seed: int, num_steps: int, num_host_slots: int | None = 0) -> Counter[str]:
    """num_host_slots: None for some, drawn"""
    random = Random(seed)
    tenants = random.choice(TENANTS)
    return run(World(random, num_host_slots=num_host_slots), tenants, num_steps).counts


def run(world: World, tenants: tuple[str | None, ...], num_steps: int) -> World:
    random = world.random
    asks = random.choice((0.1, 0.2, 0.5))
    faults = random.choice(((None,), (None, None, None, "raise"), (None,) * 8 + ("nan", "raise")))
    for _ in range(num_steps):
        if random.random() < asks and len(world.sequences) < 20:
            world.ask(random_ask(world, tenants))
        if world.sequences and random.random() < 0.01:
            world.abort(random.choice(list(world.sequences.values())).request_id)
        if random.random() < 0.005:
            world.memory.reset_prefix_cache()
        world.step(random.choice(faults))
    world.drain()
    return world


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_block_holds_what_its_sequences_must_find(part: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(part * WORLDS_PER_PART, (part + 1) * WORLDS_PER_PART):
        total += run_world(seed, STEPS_PER_WORLD)
    assert total["steps"] >= WORLDS_PER_PART * STEPS_PER_WORLD
    for what in ("preemptions", "hits", "copies", "passes", "failed passes", "waits"):
        assert total[what] > 200, f"{total} has hardly any {what}"
    for what in ("fairness", "forks that wait"):
        assert total[what] >= 10, f"{total} has hardly any {what}"


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_with_slots_on_the_host(part: int) -> None:
    """The same, while prefixes come back from slots and sequences are parked in them."""
    total: Counter[str] = Counter()
    for seed in range(part * WORLDS_PER_PART, (part + 1) * WORLDS_PER_PART):
        total += run_world(10_000 + seed, STEPS_PER_WORLD, None)
    for what in ("gone", "from disk"):
        assert total[what] >= 2, f"{total} has hardly any {what}"
    for what in ("parked", "resumed", "loaded", "preemptions", "hits", "passes", "failed passes"):
        assert total[what] > 100, f"{total} has hardly any {what}"


@pytest.mark.parametrize("tenant", [None, "a"])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_one_tenant_is_served_as_if_there_were_no_tenants(part: int, tenant: str | None) -> None:
    """The same plans, step by step, by faults and aborts, as of a scheduler with one list."""
    total: Counter[str] = Counter()
    for seed in range(part * 15, (part + 1) * 15):
        found, plain = (
            run(World(Random(seed), kind), (tenant,), num_steps=150) for kind in (Scheduler, OneTenant)
        )
        assert found.plans == plain.plans
        total += found.counts
    assert total["fairness"] == 0
    assert min(total[what] for what in ("preemptions", "hits", "passes", "failed passes", "waits")) > 0
