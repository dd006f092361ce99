"""A mistake ends the request that it belongs to, and no other: the others get the tokens they always get."""

from __future__ import annotations

import logging

import pytest
import tiny
from breaking import GREEDY, MANY, POISON, SAMPLED, answers, every_kind, run
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.engine.sampling import sampler
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


def test_a_sampler_that_fails_for_one_draws_the_same_for_others(make_llm, monkeypatch):
    good = [(p, params, None) for (p, _, _), params in zip(every_kind(), [SAMPLED, MANY] * 4, strict=False)]
    llm = make_llm()
    expected = answers(run(llm, good))

    class Broken(sampler.LogitsProcessor):
        def applies(self, row):
            return row.params.repetition_penalty == 1.25

        def apply(self, logits, places, rows):
            raise RuntimeError("boom")

    monkeypatch.setattr(sampler, "PROCESSORS", (*sampler.PROCESSORS, Broken()))
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
        # the poisoned prompt is the one of the three whose rows are computed first
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


class Failing:
    """A detokenizer of which one method raises."""

    text = "so far"

    def __init__(self, method):
        self.method = method

    def append(self, token_id, *, may_stop):
        self.fail("append")

    def finish(self):
        self.fail("finish")

    def fail(self, method):
        if method == self.method:
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
        breaks(engine.memory, where, lambda seq_id, *rest, **_: seq_id == seq.seq_id)
    elif where == "match_prefix":
        breaks(engine.memory, where, lambda keys, **_: keys is seq.keys)
    elif where == "generator":
        seq.generator = "none"
    elif where in ("append", "finish"):
        seq.detokenizer = Failing(where)
    elif where == "shrink":
        breaks(engine.memory, where, lambda plan: plan.seq_id == seq.seq_id)
    elif where == "choose":
        way = engine.compression.methods[EvictionMethod.COMPACT]
        breaks(way, where, lambda jobs: any(job.seq is seq for job in jobs))
    else:
        breaks(engine.compression.methods[EvictionMethod.COMPACT], where, lambda job, _: job.seq is seq)


PLACES = (
    "commit",
    "can_grow",
    "grow",
    "fork",
    "indexed_len",
    "match_prefix",
    "generator",
    "append",
    "finish",
)
PASS_PLACES = ("shrink", "choose", "apply")


@pytest.mark.parametrize("where", PLACES + PASS_PLACES)
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
    request.sequences[0].detokenizer = Failing("finish")
    llm.abort("r")
    assert request.error == "RuntimeError: no end"
    assert_idle(llm)


def test_blocks_that_cannot_be_returned_harm_no_other_request(make_llm, monkeypatch, caplog):
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
