"""Compactions that the page receives, against the memory manager's own changes."""

from __future__ import annotations

import pytest

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.page.frames import Compaction
from kvreclaim.server.page.snapshot import CompactionRecorder


def changes(engine_memory: MemoryManager, patch: pytest.MonkeyPatch) -> list[tuple[set[int], set[int]]]:
    """(blocks before, blocks after) of each shrink to come, in order."""
    seen: list[tuple[set[int], set[int]]] = []
    shrink = engine_memory.shrink

    def noted(plan):
        before = set(engine_memory.table(plan.seq_id).blocks())
        shrunk = shrink(plan)
        seen.append((before, set(engine_memory.table(plan.seq_id).blocks())))
        return shrunk

    patch.setattr(engine_memory, "shrink", noted)
    return seen


def run(llm: LLM) -> tuple[list[Compaction], CompactionRecorder]:
    """Two requests, one of two outputs; snapshots after every step."""
    engine, recorder, compactions = llm.engine, CompactionRecorder(), []
    compressor = llm.compressor(CompressionConfig("query_mixture", budget=512, recent=64, interval=64))
    for index, n in enumerate((1, 2)):
        prompt = list(DEMO_TASKS["recall"].make(1024).sample(index).prompt)
        params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=1.0, seed=index, n=n)
        engine.add_request(f"r{index}", prompt, params, compressor)
    while engine.has_unfinished:
        result = engine.step()
        recorder.stepped(engine, result)
        for request in result.requests:
            if request.finished:
                recorder.ended(engine, request)
        compactions += recorder.take(engine).compactions
    return compactions, recorder


@pytest.mark.parametrize("num_blocks", [512, 90])  # 90: requests are preempted
def test_each_compaction_names_the_blocks_that_left(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    llm = LLM(demo_model(), num_blocks=num_blocks)
    expected = changes(llm.engine.memory, monkeypatch)
    compactions, _ = run(llm)
    assert len(compactions) > 10
    assert len(compactions) == llm.engine.totals.compactions
    assert sum(each.num_evicted for each in compactions) == llm.engine.totals.tokens_evicted
    assert (sum(llm.engine.totals.preemptions.values()) > 0) == (num_blocks == 90)
    for each, (before, after) in zip(compactions, expected, strict=True):
        assert set(each.blocks.tolist()) == before - after
        assert (each.before, each.after) == (len(before), len(after))


def test_compactions_before_the_first_viewer_are_not_recorded() -> None:
    llm = LLM(demo_model(), num_blocks=512)
    engine = llm.engine
    compressor = llm.compressor(CompressionConfig("knorm", budget=256, recent=64, interval=32))
    prompt = list(DEMO_TASKS["recall"].make(1024).sample(1).prompt)
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
    engine.add_request("r", prompt, params, compressor)
    while engine.totals.compactions < 2:
        engine.step()
    recorder = CompactionRecorder()
    before = engine.totals.compactions
    while engine.totals.compactions == before:
        recorder.stepped(engine, engine.step())
    compactions = recorder.take(engine).compactions
    assert [(each.request_id, each.num_evicted) for each in compactions] == [("r", 32)]
    assert recorder.take(engine).compactions == []
