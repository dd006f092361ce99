from __future__ import annotations

from itertools import count

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory import BlockResidency, CompactionPlan, MemoryManager
from kvreclaim.memory.blocks import SAMPLED

from .sequences import find, run


class Clock:
    """calls: how often it was looked at."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def __call__(self) -> float:
        self.calls += 1
        return self.now


def serve(memory: MemoryManager, seq_id: int, tokens) -> None:
    run(memory, seq_id, tokens)
    memory.free(seq_id)


def test_the_life_of_a_block():
    """Two blocks: the second makes way at 3 without a hit, the first is hit at 3 and 10 and goes at 12."""
    clock = Clock()
    memory = MemoryManager(2, 4, residency_sample=1, clock=clock)
    serve(memory, 0, range(8))
    for clock.now in (3.0, 10.0):
        serve(memory, 1, range(5))
    assert memory.pool.residency.drain() == [BlockResidency(3.0, 3.0, ())]
    clock.now = 12.0
    serve(memory, 2, range(50, 57))
    assert memory.pool.residency.drain() == [BlockResidency(12.0, 2.0, (3.0, 7.0))]
    assert memory.pool.residency.drain() == []


def test_what_is_not_evicted_is_not_told():
    memory = MemoryManager(8, 4, residency_sample=1, clock=Clock())
    run(memory, 0, range(8))
    block = memory.table(0).block_ids[0]
    memory.shrink(CompactionPlan(0, 3, (block,), (block,)))
    memory.free(0)
    serve(memory, 1, range(50, 58))
    memory.reset_prefix_cache()
    memory.check()
    serve(memory, 2, range(70, 100))
    assert memory.pool.residency.drain() == []


@pytest.mark.parametrize("sample", [0.0, 0.01, 0.25, 1.0])
def test_a_share_of_the_blocks_is_measured(sample):
    memory = MemoryManager(5000, 1, residency_sample=sample)
    serve(memory, 0, range(4000))
    memory.check()
    sampled = sum(1 for mark in memory.pool.marks if mark & SAMPLED)
    spread = (4000 * sample * (1 - sample)) ** 0.5
    assert abs(sampled - 4000 * sample) <= 4 * spread


@pytest.mark.parametrize("sample", [0.0, 0.05, 1.0])
def test_the_clock_is_looked_at_for_sampled_blocks_alone(sample):
    clock = Clock()
    memory = MemoryManager(64, 1, residency_sample=sample, clock=clock)
    looks = 0
    for seq_id in range(100):
        tokens = range(seq_id // 2, seq_id // 2 + 60)
        match = find(memory, tokens)
        looks += sum(memory.pool.marks[block] & SAMPLED > 0 for block in match.block_ids)
        begun = len(memory.pool.residency)
        memory.admit(seq_id, match)
        memory.grow(seq_id, 60 - match.num_tokens)
        ended = begun - len(memory.pool.residency)
        memory.commit(seq_id, len(tokens) - match.num_tokens)
        looks += ended + len(memory.pool.residency) - begun + ended
        memory.free(seq_id)
    assert clock.calls == looks
    assert (looks == 0) == (sample == 0)


def test_what_nobody_asks_for_is_bounded():
    memory = MemoryManager(10, 1, residency_sample=1, clock=Clock())
    for seq_id in count():
        serve(memory, seq_id, [seq_id] * 10)
        if seq_id == 900:
            break
    assert len(memory.pool.residency.drain()) == 8192
    for _ in range(40):
        serve(memory, 0, [901] * 3)
    serve(memory, 0, range(10))
    assert max(len(life.reuse_gaps_s) for life in memory.pool.residency.drain()) == 16


@pytest.mark.parametrize("sample", [-0.1, 2, float("nan"), None])
def test_a_share_that_is_none_is_refused(sample):
    with pytest.raises(InvalidArgumentError, match="residency_sample is"):
        MemoryManager(4, 4, residency_sample=sample)
