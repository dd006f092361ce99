"""Leaps over decode steps change no count; memory of windows is that of the formulas."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_loads import COST, counters, random_requests, random_settings, simulate, times
from window_groups import CONTEXTS, SHAPES, GroupsPlan, held_bytes, hit_rows

from kvreclaim.memory.groups.state_slots import StateSizes
from kvreclaim.memory.windows import ChunkedWindow, Place, Window, grouping
from kvreclaim.sim.cluster import Cluster


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_leaps_are_steps(seed: int) -> None:
    random = Random(seed)
    chosen, requests = random_settings(random), random_requests(random, 25)
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


@pytest.mark.parametrize(
    ("model", "ratios"),
    [
        ("gpt-oss-20b", (1.97, 1.99, 2.0)),
        ("gemma-2-9b", (1.33, 1.78, 1.94)),
        ("gemma-3-4b", (3.89, 5.73, 6.5)),
        ("gemma-3-27b", (3.54, 5.22, 5.92)),
        ("llama-4-scout", (1.0, 2.29, 3.37)),
    ],
)
def test_memory_of_one_sequence(model, ratios):
    """Layers of the same kind by the formula: blocks of all tokens, and of the window or the chunk."""
    shape = SHAPES[model]
    for context, ratio in zip(CONTEXTS, ratios, strict=True):
        together, grouped = (held_bytes(shape, context, grouped=grouped) for grouped in (False, True))
        found = grouping(shape.windows)
        tables = sum(window.num_blocks for window in found.windows)
        entries = shape.window.num_tokens // 16  # the last token ends a block
        blocks = context // 16 + tables * min(entries, context // 16)
        assert grouped == blocks * len(found.full) * 16 * shape.token_bytes
        assert together / grouped == pytest.approx(ratio, abs=0.005)


def test_layers_are_put_into_groups_of_as_many_as_have_full_attention():
    four, eight = Window(4), ChunkedWindow(8)
    found = grouping([four, four, None, eight, four, None, four, four])
    assert found.full == (2, 5)
    assert found.windows == (Window(4, 3), ChunkedWindow(8, 1))
    assert found.places == tuple(
        Place(*each) for each in ((1, 0), (1, 1), (0, 0), (4, 0), (2, 0), (0, 1), (2, 1), (3, 0))
    )
    assert grouping([None, None]) is None
    assert grouping([four, four]) is None


def test_conversations_hit_what_they_would_in_a_pool_without_end():
    """Hits fall where windows that have been left go behind everything else that is cached, as elsewhere."""
    rows = hit_rows(GroupsPlan(conversations=12, turns=3, question=100, answer=4000), occupancies=(0.9,))
    assert {row["model"] for row in rows} == {"gpt-oss-20b", "gemma-3-4b"}
    assert all(row["most"] > 50_000 for row in rows)
    assert all(row["share"] >= 0.95 for row in rows)
    full = next(row for row in rows if row["model"] == "gemma-3-4b")
    assert full["share_last_out"] < 0.5
