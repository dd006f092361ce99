"""What makes the simulator fast changes no count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_loads import COST, counters, random_requests, random_settings, simulate, times

from kvreclaim.memory.groups.state_slots import StateSizes
from kvreclaim.schedule import Footprint
from kvreclaim.sim.cluster import Cluster
from kvreclaim.sim.extents.pool import ExtentPool
from kvreclaim.sim.request import SimRequest
from kvreclaim.sim.settings import Settings


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_extents_are_blocks(seed: int) -> None:
    random = Random(seed)
    chosen, requests = random_settings(random), random_requests(random, 25)
    extents, blocks = (simulate(replace(chosen, extents=on), requests) for on in (True, False))
    assert counters(extents) == counters(blocks)
    assert times(extents) == pytest.approx(times(blocks), rel=1e-9, abs=1e-9)


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_leaps_are_steps(seed: int) -> None:
    random = Random(seed)
    chosen, requests = random_settings(random), random_requests(random, 25)
    chosen = replace(chosen, extents=random.random() < 0.5)
    replicas, router = random.choice((1, 3)), random.choice(("rr", "least", "prefix"))
    leaps, steps = (
        simulate(replace(chosen, leaps=on), requests, num_replicas=replicas, router=router)
        for on in (True, False)
    )
    assert counters(leaps) == counters(steps)
    assert times(leaps) == pytest.approx(times(steps), rel=1e-9, abs=1e-9)


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_leaps_keep_the_states_that_steps_keep(seed: int) -> None:
    random = Random(seed)
    chosen, requests = random_settings(random), random_requests(random, 15)
    kept, interval = random.choice((None, 0, 1, 5)), random.choice((0, 2 * chosen.block_size))
    each = 2 + (chosen.host_blocks > 0)
    states = StateSizes.of(chosen.max_num_seqs, each, kept, interval)
    leaps, steps = (simulate(replace(chosen, leaps=on, states=states), requests) for on in (True, False))
    assert counters(leaps) == counters(steps)
    assert times(leaps) == pytest.approx(times(steps), rel=1e-9, abs=1e-9)


def test_small_blocks_cost_no_more_than_large_ones(monkeypatch) -> None:
    """Counted, not timed: what is done for a prompt goes by pieces of content, not by blocks."""
    calls: Counter[int] = Counter()
    enter, size = ExtentPool._enter, 0

    def counted(self, *args):
        calls[size] += 1
        return enter(self, *args)

    monkeypatch.setattr(ExtentPool, "_enter", counted)
    random = Random(1)
    requests = [
        SimRequest(
            i * 0.1, 512 * 12 + 100, 40, (*range(random.randrange(4)), *range(100 * i, 100 * i + 9)), 512
        )
        for i in range(50)
    ]
    requests = [replace(each, num_ids=512 * len(each.ids)) for each in requests]
    for size in (16, 512):
        footprint = Footprint(block_size=size)
        simulate(Settings(200_000 // size, size, footprint=footprint), requests)
    assert 0 < calls[16] < 1.5 * calls[512]


def test_the_random_loads_have_it_all() -> None:
    found: Counter[str] = Counter()
    for seed in range(150):
        random = Random(seed)
        chosen, requests = random_settings(random), random_requests(random, 25)
        cluster = Cluster(chosen, COST)
        outcome = cluster.run(requests)
        for replica in cluster.replicas:
            replica.memory.check()
            assert replica.memory.stats().in_use == 0
            found["preemptions"] += replica.preemptions.total()
            found["leaps"] += replica.num_leaps
            found["passes"] += replica.num_passes
        for stats in outcome.memory:
            found["hits"] += stats.prefix_hit_tokens
            found["evicted"] += stats.misses["evicted"]
            found["freed"] += stats.blocks_freed_by_compression
        found["recomputed"] += sum(record.recomputed_tokens for record in outcome.records)
    assert min(found[what] for what in ("preemptions", "leaps", "passes", "hits", "evicted", "freed")) > 100
    assert found["recomputed"] > 100
