"""A mistake ends the request that it belongs to, and no other: the others get the tokens they always get."""

from __future__ import annotations

import logging

import pytest
import tiny
import torch
from recording import register
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.engine import sampler
from kvreclaim.ops.kv_cache import PagedTokens

POISON = 271
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, logprobs=1)
MANY = SamplingParams(n=2, temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)
POLICIES = (None, "h2o", "snapkv", "tova", "quest", "ada_kv", "streaming_llm")
"""Between them every store that a pass adds to: attention mass, queries, digests, head tables."""


def config(policy):
    if policy == "quest":
        return small(policy, budget=32, sinks=0, recent=1)
    if policy == "ada_kv":
        return small(policy, budget=32, interval=16)
    return small(policy) if policy else None


def asked(num_tokens=50):
    """(prompt, parameters, compression) of requests of every kind."""
    prompts = [[t for t in p if t != POISON] for p in tiny.prompts((num_tokens,) * len(POLICIES), seed=3)]
    params = [GREEDY, SAMPLED, GREEDY, SAMPLED, MANY, GREEDY, MANY]
    return list(zip(prompts, params, [config(p) for p in POLICIES], strict=True))


def answers(outputs):
    return [[(o.token_ids, o.finish_reason) for o in out.outputs] for out in outputs]


def run(llm, requests):
    prompts, params, configs = (list(column) for column in zip(*requests, strict=True))
    return llm.generate(prompts, params, configs)


class Breaking:
    """Raises in the last layer of passes that `should` says, when earlier layers have written all they do."""

    def __init__(self, llm, should) -> None:
        self.ids = None
        self.num_raised = 0
        self.should = should
        model = llm.loaded.model
        model.get_input_embeddings().register_forward_pre_hook(self._note)
        model.model.layers[-1].register_forward_pre_hook(self._break)

    def _note(self, module, arguments) -> None:
        self.ids = arguments[0][0].tolist()

    def _break(self, module, arguments) -> None:
        if self.should(self.ids):
            self.num_raised += 1
            raise RuntimeError("boom")


def break_every_third(llm) -> Breaking:
    """Of the passes over several sequences every third fails, once it is nearly done."""
    forward, alone, counted = llm.engine.runner.forward, [], [0]

    def noted(step):
        alone[:] = [len(step) == 1]
        return forward(step)

    def should(ids):
        counted[0] += not alone[0]
        return not alone[0] and counted[0] % 3 == 0

    llm.engine.runner.forward = noted
    return Breaking(llm, should)


@pytest.mark.parametrize("block_size", [8, 16])
def test_only_the_guilty_request_of_a_failing_pass_ends(block_size, make_llm):
    limits = {"block_size": block_size, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    good = asked()
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


def test_a_pass_that_fails_for_no_ones_fault_ends_nobody(make_llm):
    limits = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    good = asked()
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
                tokens = PagedTokens(engine.cache, layer, ids, full * 8)
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


def test_a_sampler_that_fails_for_one_draws_the_same_for_others(make_llm, monkeypatch):
    good = [(p, params, None) for (p, _, _), params in zip(asked(), [SAMPLED, MANY] * 4, strict=False)]
    llm = make_llm()
    expected = answers(run(llm, good))
    adjust = sampler._adjust

    def broken(logits, row):
        if row.params.repetition_penalty == 1.25:
            raise RuntimeError("boom")
        adjust(logits, row)

    monkeypatch.setattr(sampler, "_adjust", broken)
    bad = SamplingParams(repetition_penalty=1.25, seed=9, max_tokens=5)
    outputs = run(llm, [good[0], ([1, 2, 3], bad, None), *good[1:]])
    assert outputs[1].error == "RuntimeError: boom"
    assert answers([outputs[0], *outputs[2:]]) == expected
    assert_idle(llm)


def test_numbers_that_are_infinite_fail_their_request_only(make_llm):
    llm = make_llm(enable_prefix_caching=False)
    good = tiny.prompts((20, 25))
    good = [[t for t in p if t != POISON] for p in good]
    expected = answers(llm.generate(good, GREEDY))
    head = llm.loaded.model.lm_head
    poisoned = []

    def blow_up(module, arguments, logits):
        # the poisoned prompt is the one of the three whose rows are asked for first
        if poisoned:
            logits = logits.clone()
            logits[0, 0, 3] = float("inf")
            poisoned.clear()
        return logits

    head.register_forward_hook(blow_up)
    poisoned.append(True)
    outputs = llm.generate([[4] * 9, *good], GREEDY)
    assert "not finite" in outputs[0].error
    assert answers(outputs[1:]) == expected
    assert_idle(llm)


class FailingFinish:
    """A detokenizer whose text cannot be ended."""

    text = "so far"

    def append(self, token_id, *, may_stop):
        return None

    def finish(self):
        raise RuntimeError("no end")


def fail_in(llm, monkeypatch, where):
    """Let one place raise for the request "bad" alone."""
    engine = llm.engine
    bad = engine.requests["bad"]

    def breaks(owner, name, concerns):
        work = getattr(owner, name)

        def broken(*args, **kwargs):
            if concerns(*args, **kwargs):
                raise RuntimeError("boom")
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, broken)

    seq = bad.sequences[0]
    if where in ("commit", "can_grow", "grow", "fork", "table", "indexed_len"):
        breaks(engine.memory, where, lambda seq_id, *rest: seq_id == seq.seq_id)
    elif where == "match_prefix":
        breaks(engine.memory, where, lambda tokens, **_: tokens is seq.token_ids)
    elif where == "generator":
        seq.generator = "none"
    elif where == "finish":
        seq.detokenizer = FailingFinish()
    else:
        breaks(engine.compression, "run", lambda one, _: one is seq)


PLACES = ("commit", "can_grow", "grow", "fork", "indexed_len", "match_prefix", "generator", "finish", "run")


@pytest.mark.parametrize("where", PLACES)
def test_wherever_one_request_fails_a_step_raises_nothing(where, make_llm, monkeypatch, caplog):
    llm = make_llm()
    engine = llm.engine
    prompts = tiny.prompts((40, 41, 42))
    expected = [out.outputs[0].token_ids for out in llm.generate([prompts[0], prompts[2]], GREEDY)]
    first = engine.add_request("first", prompts[0], GREEDY)
    params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=25, ignore_eos=True)
    bad = engine.add_request("bad", prompts[1], params, llm.compressor(small("knorm")), prompt="a secret")
    last = engine.add_request("last", prompts[2], GREEDY)
    fail_in(llm, monkeypatch, where)
    touched = []
    with caplog.at_level(logging.DEBUG, logger="kvreclaim"):
        while engine.has_unfinished:
            touched += [r.request_id for r in engine.step().requests]
    assert bad.error is not None
    assert bad.sequences[0].finish_reason == "error"
    assert "bad" in touched
    assert [r.output().outputs[0].token_ids for r in (first, last)] == expected
    failed = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert any("request bad failed" in record.getMessage() and record.exc_info for record in failed)
    assert "secret" not in caplog.text
    assert_idle(llm)


def test_a_text_that_cannot_be_ended_does_not_keep_an_abort_from_its_blocks(make_llm):
    llm = make_llm()
    request = llm.engine.add_request("r", tiny.prompts((40,))[0], GREEDY)
    llm.engine.step()
    request.sequences[0].detokenizer = FailingFinish()
    llm.abort("r")
    assert request.error == "RuntimeError: no end"
    assert_idle(llm)


def test_blocks_that_cannot_be_returned_are_missed_by_nobody_else(make_llm, monkeypatch, caplog):
    llm = make_llm()
    engine, prompts = llm.engine, tiny.prompts((40, 41))
    expected = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)]
    bad = engine.add_request("bad", prompts[0], GREEDY)
    good = engine.add_request("good", prompts[1], GREEDY)
    free = engine.memory.free

    def broken(seq_id):
        if seq_id == bad.sequences[0].seq_id:
            raise AssertionError("boom")
        return free(seq_id)

    monkeypatch.setattr(engine.memory, "free", broken)
    while engine.has_unfinished:
        engine.step()
    assert [r.output().outputs[0].token_ids for r in (bad, good)] == expected
    assert "returning the blocks of request bad failed" in caplog.text
    assert not engine.scheduler.running


def test_an_observer_that_raises_fails_its_score_only(make_llm):
    llm = make_llm()
    prompts, continuations = tiny.prompts((10, 10)), tiny.prompts((12, 12), seed=2)
    expected = llm.score(prompts, continuations)

    def broken(first, logprobs):
        raise RuntimeError("boom")

    scored = llm.score(prompts, continuations, observers=[broken, None])
    assert scored[0].error == "RuntimeError: boom"
    assert scored[1].logprobs == expected[1].logprobs
    assert_idle(llm)


def test_a_mass_that_is_put_back_is_bit_for_bit_what_it_was(make_llm):
    """Also if the store has grown meanwhile."""
    llm = make_llm()
    store = llm.engine.signals._mass
    store.take(7)
    store.take(8)
    store.reserve(5)
    store.tensor.copy_(torch.rand_like(store.tensor))
    before = store.tensor.clone()
    undo = store.saved([8])
    store.add(store.index([8, 7]), 0, torch.ones(2, store.tensor.shape[2], 5))
    store.reserve(9)
    store.add(store.index([8]), 1, torch.ones(1, store.tensor.shape[2], 9))
    undo()
    assert torch.equal(store.row(8)[..., :5], before[store.index([8])][0])
    assert not store.row(8)[..., 5:].any()
    assert not torch.equal(store.row(7)[..., :5], before[store.index([7])][0])
