"""Counts of the states of recurrent layers: in statistics, metrics, the page."""

from __future__ import annotations

import tiny

from kvreclaim import LLM, SamplingParams
from kvreclaim.memory.groups.state_slots import StateCounts
from kvreclaim.memory.prefix.index import STATE
from kvreclaim.server.metrics.observer import _cache_values
from kvreclaim.server.page.snapshot import CompactionRecorder

COMMON, *TAILS = tiny.prompts((40, 9, 11), seed=6)


def test_slots_checkpoints_and_misses(tiny_dir) -> None:
    llm = LLM(tiny_dir("lfm2"), dtype="float32", device="cpu", num_blocks=60, block_size=8, max_num_seqs=4)
    engine = llm.engine
    assert engine.memory.stats().states == StateCounts(free=12)
    engine.add_request("a", COMMON + TAILS[0], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()  # cut behind the last full block of the prompt
    assert engine.memory.stats().states == StateCounts(in_use=1, free=11, checkpoints=1)
    engine.step()
    assert engine.memory.stats().states == StateCounts(in_use=1, cached=1, free=10, checkpoints=1)
    while engine.has_unfinished:
        engine.step()
    llm.generate([COMMON + TAILS[1]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    stats = engine.memory.stats()
    assert stats.states == StateCounts(cached=3, free=9, checkpoints=3)  # two ends, and where they part
    assert stats.misses[STATE] == 48  # all full blocks: 40 tokens were cached, without a state behind them
    values = _cache_values(stats)
    assert values["kvreclaim:state_slots"] == {"in_use": 0, "cached": 3, "free": 9}
    assert values["kvreclaim:state_checkpoints"] == 3
    shown = CompactionRecorder().take(engine).states
    assert shown == {"in_use": 0, "cached": 3, "free": 9, "checkpoints": 3}
