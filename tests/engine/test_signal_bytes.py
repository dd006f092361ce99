"""Signals that policies need count: their bytes are known beforehand, and their bound holds."""

from __future__ import annotations

import pytest
import tiny
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.engine.signals.needs import signal_bytes
from kvreclaim.errors import InvalidArgumentError

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
POLICIES = ("snapkv(window=8)", "tova", "r_kv", "h2o", "quest")


def config(policy):
    return small(policy, budget=32, interval=16, sinks=0, recent=1)


def stores(engine):
    signals = engine.signals
    return [*signals._queries.values(), signals._mass, signals.digests]


def run(llm, policy, prompts, watch):
    engine = llm.engine
    compressor = llm.compressor(config(policy))
    requests = [engine.add_request(f"r{i}", p, PARAMS, compressor) for i, p in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
        assert engine.signals.room.used == sum(store.tensor.nbytes for store in stores(engine))
        watch(compressor)
    assert engine.signals.room.used == 0
    assert_idle(llm)
    return requests


@pytest.mark.parametrize("policy", POLICIES)
def test_stores_take_no_more_than_signal_bytes(policy, make_llm):
    llm = make_llm(block_size=8, max_num_batched_tokens=64, enable_prefix_caching=False)
    engine, most = llm.engine, [0]

    def watch(compressor):
        used, slots = engine.signals.room.used, 0
        if engine.signals._mass.tensor.numel():
            slots = engine.signals._mass.tensor.shape[-1]
        if engine.signals.digests.tensor.numel():
            slots = engine.signals.digests.tensor.shape[-2] * 8
        rows = max(len(store.tensor) for store in stores(engine))
        assert rows <= 4
        assert used <= rows * signal_bytes(compressor, llm.loaded.facts, slots, 8)
        assert slots <= 2 * 128
        most[0] = max(most[0], used)

    requests = run(llm, policy, tiny.prompts((70, 60, 50), seed=3), watch)
    assert not any(request.error for request in requests)
    assert most[0] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bound_holds_and_whoever_exceeds_it_fails_alone(policy, make_llm):
    llm = make_llm(block_size=8, max_num_batched_tokens=256, enable_prefix_caching=False)
    compressor = llm.compressor(config(policy))
    limit = 5 * signal_bytes(compressor, llm.loaded.facts, 104, 8) // 2
    free = run(llm, policy, tiny.prompts((70, 60), seed=3)[:1], lambda _: None)[0]
    bound = make_llm(
        block_size=8, max_num_batched_tokens=256, enable_prefix_caching=False, max_signal_bytes=limit
    )

    def watch(_):
        assert bound.engine.signals.room.used <= limit

    requests = run(bound, policy, tiny.prompts((70, 60, 50, 40), seed=3), watch)
    failed = [request for request in requests if request.error is not None]
    assert 0 < len(failed) < 4
    assert all("max_signal_bytes" in request.error for request in failed)
    if requests[0].error is None:
        assert requests[0].sequences[0].token_ids == free.sequences[0].token_ids


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_can_never_fit_is_refused(policy, make_llm):
    llm = make_llm(block_size=8, max_signal_bytes=64)
    with pytest.raises(InvalidArgumentError, match="max_signal_bytes"):
        llm.generate(tiny.prompts((70,), seed=3), PARAMS, config(policy))
    llm.generate(tiny.prompts((70,), seed=3), PARAMS, config("knorm"))
    assert_idle(llm)
