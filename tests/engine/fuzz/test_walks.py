"""Short random walks of fixed seeds, and walks that once failed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import cycle

import pytest
from alone import GRAMMARS
from operations import POLICIES, Ask, NotFinite, Raise, Setup, Step
from walk import Walk

from kvreclaim.engine.attend import streamed

SEEDS = (1020, 1023, 1026, 1027, 1030, 1033, 1036, 1037, 1042, 1043)
"""Seeds of walks in which something happens."""
HYBRID_SEEDS = (2003, 2005, 2007)
FORMS = ({}, {"talk": True}, {"crowd": True})
STEPS = 40
LOSSY = Walk(
    Setup(num_blocks=40, max_num_batched_tokens=40),
    (
        Ask(cut=20, policy="quest", max_tokens=14),
        Step(30),
        Ask(turn_of=0, max_tokens=9),
    ),
)
"""A continuation of an answer that was computed under sparse reads hits none of the answer's blocks."""
NOT_FINITE = Walk(
    Setup(num_blocks=40, max_num_batched_tokens=16, shadow=False),
    (Ask(cut=27), NotFinite("all"), Step(4), Ask(cut=27)),
)
"""Blocks computed with NaN are hit by no prompt, also where no request reads the logits of a chunk."""
COPIED = Walk(
    Setup(num_blocks=5, max_num_seqs=3, prefix_caching=False),
    tuple(
        each
        for times in range(1, 12)
        for each in (
            Ask(cut=9, tail=(), kind="many"),
            Ask(text=1, cut=8, tail=()),
            Step(times),
            Raise(1),
            Step(40),
        )
    ),
)
"""A copy whose source another sequence has got is not made again."""
ALL_GAVE_WAY = Walk(
    Setup(
        kv_format="int8",
        num_blocks=8,
        max_num_seqs=6,
        max_num_batched_tokens=40,
        eviction_policy="slru",
        host_slots=1,
        preemption_mode="swap",
        preemption_victim="priority",
        prefix_snapshot_fraction=0.5,
        disk_slots=20,
    ),
    (
        Ask(
            text=2,
            cut=27,
            tail=(9, 17, 5, 5, 9),
            policy="ada_kv(snapkv(window=2), alpha=0)",
            interval=6,
            kind="many",
            seed=1,
            max_tokens=1,
            retention=8,
            tenant="x",
            compress_prompt_at=14,
        ),
        Ask(
            text=1,
            cut=1,
            tail=(5, 17),
            policy="r_kv(window=3)",
            kind="many",
            max_tokens=9,
            stop=(7, 11, 30),
            retention=8,
            tenant="x",
            compress_prompt_at=14,
        ),
    ),
)
"""A step in which all requests were preempted is none in which no request fits."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_walk(seed, machine, oracle):
    counts = Walk.of_seed(seed, STEPS).run(machine, oracle)
    assert counts["steps"] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_walk_in_a_crowd(seed, machine, oracle):
    """Requests that share blocks, in a pool with hardly any to spare, are answered as alone."""
    counts = Walk.of_seed(seed, STEPS, crowd=True).run(machine, oracle)
    assert counts["steps"] > 0


def test_random_walks_of_conversations(machine, oracle):
    """Turns attend to what the ones before have kept, whatever happens; all others are answered as alone."""
    counts = Counter()
    for seed in SEEDS[:3]:
        counts += Walk.of_seed(seed, STEPS, talk=True).run(machine, oracle)
    assert counts["turns gone on"] > 3


@pytest.mark.parametrize("talk", [False, True])
def test_random_walks_that_drop_spans(talk, machine, oracle):
    """Turns that begin with what the ones before have dropped, and others, answered as alone."""
    counts = Counter()
    for seed in SEEDS[:3]:
        counts += Walk.of_seed(seed, STEPS, talk=talk, crowd=not talk, drop=True).run(machine, oracle)
    assert counts["dropped tokens"] > 100
    assert (counts["turns gone on"] > 0) == talk


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed != 1033])  # whose pool takes no request
def test_a_random_walk_over_blocks_in_host_memory(seed, machine, oracle, monkeypatch):
    monkeypatch.setattr(streamed, "PIECE_BYTES", (1, 1 << 11, 1 << 22)[seed % 3])
    drawn = Walk.of_seed(seed, STEPS)
    setup = replace(
        drawn.setup,
        on_host=True,
        shadow=False,
        host_slots=0,
        disk_slots=0,
        windows="",
        plain_windows=False,
        kernels="reference",
        preemption_mode="auto",
    )
    operations = tuple(
        replace(each, policy=None, compress_prompt_at=None, sparse=None, reuse=None)
        if isinstance(each, Ask) and i % 5
        else each
        for i, each in enumerate(drawn.operations)
    )
    counts = Walk(setup, operations).run(machine, oracle)
    assert counts["steps"] > 0


@pytest.mark.parametrize("on_host", [False, True])
def test_random_walks_that_verify(on_host, machine, oracle):
    """Answers are those of uncompressed requests, whatever is preempted, fails or is aborted."""
    counts = Counter()
    for seed in SEEDS:
        drawn = Walk.of_seed(seed, STEPS)
        setup = replace(drawn.setup, windows="", plain_windows=False, shadow=False, drafts=seed % 3)
        if on_host:
            setup = replace(setup, on_host=True, host_slots=0, disk_slots=0)
            setup = replace(setup, preemption_mode="auto")
        policies = cycle(POLICIES[seed % 5 :: 3])
        operations = tuple(
            replace(
                each,
                policy=next(policies),
                verify=1 + i % 7,
                compress_prompt_at=None,
                sparse=None,
                reuse=None,
            )
            if isinstance(each, Ask)
            else each
            for i, each in enumerate(drawn.operations)
        )
        counts += Walk(setup, operations).run(machine, oracle)
    assert counts["verifications"] > 100
    assert counts["verified drafts"] > 50


@pytest.mark.parametrize("seed", HYBRID_SEEDS)
def test_a_random_walk_over_recurrent_layers(seed, machine, oracle):
    """States are those of the request alone, whatever fails, is preempted, forked, compressed or drafted."""
    counts = Walk.of_seed(seed, STEPS, hybrid=True, **FORMS[seed % 3]).run(machine, oracle)
    assert counts["steps"] > 0


def test_random_walks_that_follow_grammars(machine, oracle):
    """Each output is the beginning of what its grammar allows: with drafts and without, compressed, forked,
    preempted."""
    counts = Counter()
    for seed in (1026, 1038):
        drawn, limits = Walk.of_seed(seed, STEPS, crowd=True), cycle(GRAMMARS)
        operations = tuple(
            replace(each, limits=next(limits)) if isinstance(each, Ask) else each for each in drawn.operations
        )
        counts += Walk(replace(drawn.setup, drafts=seed % 4), operations).run(machine, oracle)
    assert counts["tokens of grammars"] > 100
    assert counts["preemptions"] > 0
    assert counts["passes"] > 0
    assert counts["accepted"] > 0


@pytest.mark.parametrize("walk", [LOSSY, NOT_FINITE, COPIED, ALL_GAVE_WAY])
def test_a_walk_that_failed_once(walk, machine, oracle):
    walk.run(machine, oracle)
