"""What makes the simulator fast changes no count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_loads import COST, counters, random_requests, random_settings, simulate, times

from kvreclaim.sim.cluster import Cluster


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
