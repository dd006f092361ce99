"""A forward pass that fails ends the request whose fault it is; the others get the tokens they always get."""

from __future__ import annotations

import pytest
import tiny
import torch
from breaking import GREEDY, POISON, Breaking, answers, break_every_third, every_kind, run
from recording import register
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.ops.kv_cache import PagedTokens


@pytest.mark.parametrize("block_size", [8, 16])
def test_only_the_guilty_request_of_a_failing_pass_ends(block_size, make_llm):
    limits = {"block_size": block_size, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    good = every_kind()
    expected = answers(run(make_llm(**limits), good))
    llm = make_llm(**limits)
    breaking = Breaking(llm, lambda ids: POISON in ids)
    bad = [1, 2, 3, *[5] * 60, POISON]
    outputs = run(llm, [*good[:3], (bad, GREEDY, small("h2o")), *good[3:]])
    assert outputs[3].outputs[0].finish_reason == "error"
    assert outputs[3].error == "RuntimeError: boom"
    assert answers(outputs[:3] + outputs[4:]) == expected
    assert breaking.num_raised == 2, "once among others, once alone"
    assert_idle(llm)


def test_a_pass_that_fails_by_no_requests_fault_ends_none(make_llm):
    limits = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    good = every_kind()
    expected = answers(run(make_llm(**limits), good))
    llm = make_llm(**limits)
    breaking = break_every_third(llm)
    assert answers(run(llm, good)) == expected
    assert breaking.num_raised > 10
    assert_idle(llm)


@pytest.mark.parametrize("want", ["mass", "queries"])
def test_what_a_failed_pass_has_seen_counts_once(want, make_llm, monkeypatch):
    """Every view that a policy is given is that of a run in which nothing failed."""
    recorder = register(monkeypatch)
    found = []
    for breaks in (False, True):
        recorder.seen.clear()
        llm = make_llm(max_num_batched_tokens=64, enable_prefix_caching=False)
        breaking = break_every_third(llm) if breaks else None
        settings = small("recorder", options={"want": want, "window": 5})
        llm.generate(tiny.prompts((50, 53), seed=1), GREEDY, settings)  # no two passes at the same length
        found.append({(seen.layer, seen.logical_len): getattr(seen.signals, want) for seen in recorder.seen})
    assert breaking.num_raised > 5
    assert len(found[0]) > 10
    assert found[0].keys() == found[1].keys()
    for place, signal in found[0].items():
        torch.testing.assert_close(found[1][place], signal, atol=1e-4, rtol=1e-4)


def test_digests_are_those_of_the_keys_after_a_failed_pass(make_llm):
    llm = make_llm(max_num_batched_tokens=64, enable_prefix_caching=False, block_size=8)
    engine = llm.engine
    compressor = llm.compressor(small("quest", budget=32, sinks=0, recent=1))
    for i, prompt in enumerate(tiny.prompts((50, 53), seed=1)):
        engine.add_request(f"r{i}", prompt, GREEDY, compressor)
    breaking, num_checked = break_every_third(llm), 0
    while engine.has_unfinished:
        engine.step()
        for seq in engine.scheduler.running:
            full = (seq.num_computed if seq.seq_id in engine.signals.digests else 0) // 8
            ids = torch.tensor(engine.memory.table(seq.seq_id).blocks()[:full])
            for layer in range(engine.cache.num_layers if full else 0):
                tokens = PagedTokens(engine.cache.layers[layer], ids, full * 8)
                keys = engine.backend.gather_tokens(tokens)[0].unflatten(1, (full, 8))
                low, high = engine.signals.digests.row(seq.seq_id)[layer, :, :, :full]
                assert torch.equal(low, keys.amin(2))
                assert torch.equal(high, keys.amax(2))
                num_checked += 1
    assert breaking.num_raised > 5
    assert num_checked > 50


def test_siblings_of_a_sequence_that_fails_end_with_it(make_llm):
    llm = make_llm()
    prompt = [t for t in tiny.prompts((20,))[0] if t != POISON]
    engine = llm.engine
    engine.add_request("three", prompt, SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=20))
    fine = engine.add_request("fine", prompt, GREEDY)
    expected = make_llm().generate(prompt, GREEDY)[0].outputs[0].token_ids
    engine.step()
    three = engine.requests["three"]
    three.sequences[1].token_ids[-1] = POISON
    Breaking(llm, lambda ids: POISON in ids)
    while engine.has_unfinished:
        engine.step()
    assert {seq.finish_reason for seq in three.sequences} == {"error"}
    assert fine.output().outputs[0].token_ids == expected
    assert_idle(llm)
