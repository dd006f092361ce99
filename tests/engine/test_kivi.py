"""kivi4 in the engine: open blocks follow their sequences through forks, preemption, failed passes and
compaction, and attention is always plain attention over what the cache holds."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import tiny
from breaking import break_every_third
from kivi_shadow import KiviShadow
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.config import EngineConfig
from kvreclaim.engine.execute import graphs
from kvreclaim.ops import native
from kvreclaim.schedule import StepPlan

NATIVE = pytest.mark.skipif(native.unavailable_reason() is not None, reason="the extension is not there")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
TOLERANCE = 1e-5
PER_CODE = 0.07
"""Half a step of 15 by channel and another by token, in units of the spread of all dims."""
POLICIES = (
    "query_mixture",
    "knorm",
    "h2o",
    "ada_kv(snapkv(window=2),alpha=0)",
    "pyramidkv(query_mixture)",
    "shares(surrogate)",
    "paged_eviction",
    "evict_only(knorm)",
    "quest",
)


@pytest.fixture
def kivi(make_llm):
    def make(**arguments):
        limits = {"block_size": 8, "max_num_batched_tokens": 32, "kernels": "reference"}
        return make_llm(kv_cache_dtype="kivi4", **{**limits, **arguments})

    return make


def settings(policy):
    if policy == "quest":
        return small(policy, budget=40, recent=6)
    return small(policy, budget=32) if policy.startswith(("ada", "pyra", "shares")) else small(policy)


def run(llm, prompts, params=GREEDY, config=None, shadow=None):
    """All answers, the shadow asked after every step."""
    engine = llm.engine
    compressor = None if config is None else llm.compressor(config)
    requests = [engine.add_request(f"r{i}", prompt, params, compressor) for i, prompt in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
        if shadow is not None:
            shadow.check_held()
    assert [request.error for request in requests] == [None] * len(requests)
    assert_idle(llm)
    return requests


def texts(requests):
    return [[seq.token_ids for seq in request.sequences] for request in requests]


def check(llm, monkeypatch, prompts, params=GREEDY, config=None, bound=PER_CODE):
    shadow = KiviShadow(llm, monkeypatch)
    requests = run(llm, prompts, params, config, shadow)
    assert shadow.worst <= TOLERANCE, f"attention is off by {shadow.worst:.2e}"
    assert shadow.furthest <= bound, f"a token is off by {shadow.furthest:.3f} of the spread"
    assert shadow.num_checked > 30
    return shadow, requests


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_tokens_of_open_blocks_are_exact_and_of_full_ones_near(family, kivi, monkeypatch):
    llm = kivi(family=family, enable_prefix_caching=False)
    assert llm.engine.cache.shape.latent == (family == "deepseek-v3")
    shadow, _ = check(llm, monkeypatch, tiny.prompts((70, 9, 33), seed=3), bound=0.04)
    assert shadow.furthest > 0.01, "nothing was quantised"


@pytest.mark.parametrize("policy", POLICIES)
def test_attends_what_each_policy_keeps(policy, kivi, monkeypatch):
    llm = kivi(enable_prefix_caching=False)
    shadow, _ = check(llm, monkeypatch, tiny.prompts((70, 9, 33), seed=3), config=settings(policy))
    assert shadow.num_passes >= 3 or policy == "quest"


def test_a_budget_that_is_no_multiple_of_the_block(kivi, monkeypatch):
    """Each pass leaves a tail of survivors in bf16, which is sealed again and moves again."""
    check(
        kivi(enable_prefix_caching=False),
        monkeypatch,
        tiny.prompts((70, 9, 33), seed=3),
        config=small("knorm", budget=21),
        bound=0.15,
    )


@pytest.mark.parametrize("policy", [None, "query_mixture", "evict_only(knorm)"])
def test_forks_and_preemption(policy, kivi, monkeypatch):
    llm = kivi(enable_prefix_caching=False, num_blocks=30)
    check_forks(llm, policy, monkeypatch)
    assert policy == "query_mixture" or sum(llm.engine.totals.preemptions.values()) > 0


def check_forks(llm, policy, monkeypatch):
    params = SamplingParams(temperature=1.0, n=3, max_tokens=40, seed=1, ignore_eos=True)
    config = settings(policy) if policy else None
    check(llm, monkeypatch, tiny.prompts((30, 41), seed=3), params, config, bound=0.15)
    assert llm.engine.memory.stats().cow_copies > 0


@NATIVE
@pytest.mark.parametrize("policy", [None, "query_mixture", "ada_kv(snapkv(window=2),alpha=0)", "quest"])
def test_native_kernels(policy, kivi, monkeypatch):
    llm = kivi(enable_prefix_caching=False, block_size=16, num_blocks=22, kernels="native")
    if policy in (None, "query_mixture"):
        check_forks(llm, policy, monkeypatch)
    else:
        config = small(policy, budget=48, interval=16, recent=4)
        check(llm, monkeypatch, tiny.prompts((70, 9, 33), seed=3), config=config, bound=0.15)
    assert "native" in llm.engine.kernels


def test_a_preempted_request_gives_the_same_tokens(kivi):
    """Its prompt and what it had drawn are computed again in chunks that end with a block."""
    prompts = tiny.prompts((24, 24, 24), seed=7)
    calm = run(kivi(enable_prefix_caching=False), prompts)
    llm = kivi(enable_prefix_caching=False, num_blocks=20)
    crowded = run(llm, prompts)
    assert sum(llm.engine.totals.preemptions.values()) > 0
    assert texts(crowded)[0] == texts(calm)[0], "the first one is never preempted"


@pytest.mark.parametrize("policy", [None, "knorm", "ada_kv(snapkv(window=2),alpha=0)"])
def test_passes_that_fail_for_no_ones_fault_change_no_token(policy, kivi):
    """The second try finds the tokens of blocks that the first one sealed, and the tails it copied."""
    prompts = tiny.prompts((50, 53, 21), seed=1)
    params = SamplingParams(temperature=1.0, n=2, max_tokens=30, seed=1, ignore_eos=True)
    config = settings(policy) if policy else None
    limits = {"enable_prefix_caching": False, "max_num_batched_tokens": 64}
    expected = texts(run(kivi(**limits), prompts, params, config))
    llm = kivi(**limits)
    breaking = break_every_third(llm)
    assert texts(run(llm, prompts, params, config)) == expected
    assert breaking.num_raised > 5


def test_a_prefix_hit_reads_sealed_blocks_as_they_were_written(kivi):
    llm = kivi(max_num_batched_tokens=64)
    (prompt,) = tiny.prompts((45,), seed=2)
    first = texts(run(llm, [prompt]))
    requests = run(llm, [[*prompt[:40], 5, 6]])
    assert requests[0].metrics.num_cached_tokens == 40
    cold = texts(run(kivi(max_num_batched_tokens=64), [[*prompt[:40], 5, 6]]))
    assert texts(requests) == cold
    assert texts(run(llm, [prompt])) == first


def test_rows_are_those_of_running_sequences_and_none_leaks(kivi):
    llm = kivi(max_num_seqs=2, num_blocks=60)
    engine, rows = llm.engine, llm.engine.cache.open
    assert rows.num_rows == 6
    for i, prompt in enumerate(tiny.prompts((5, 19, 33, 8, 27), seed=5)):
        engine.add_request(f"r{i}", prompt, GREEDY)
    for number in range(200):
        if number == 9:
            engine.abort("r0")
        if not engine.has_unfinished:
            break
        engine.step()
        tables = [engine.memory.table(seq.seq_id) for seq in engine.scheduler.running]
        tails = {t.block_ids[t.physical_len // 8] for t in tables if t.physical_len % 8}
        assert tails <= rows.blocks
        engine.runner.prepare(StepPlan())
        assert rows.blocks == tails
    assert not engine.has_unfinished
    assert not rows.blocks


def test_bytes_of_the_pool_and_of_the_rows(kivi):
    cache = kivi(max_num_seqs=3, num_blocks=10).engine.cache
    facts = (cache.num_layers, cache.num_kv_heads, cache.block_size, cache.shape.k_dim + cache.shape.v_dim)
    row = 2 * facts[0] * facts[1] * facts[2] * facts[3]
    assert cache.open_bytes == 9 * row + 4 * cache.num_blocks
    assert cache.bytes_per_block == sum(plane.nbytes for plane in cache.planes) // 10
    assert (cache.bytes_per_block, row) == (2 * 2 * 173, 2048)


def test_decode_graphs_are_refused_with_the_reason(kivi, caplog):
    engine = kivi().engine
    on_gpu = SimpleNamespace(
        device=SimpleNamespace(type="cuda"), open=engine.cache.open, format=engine.cache.format
    )
    backend = SimpleNamespace(static_tables=None)
    with caplog.at_level(logging.INFO, logger="kvreclaim"):
        assert graphs.decode_graphs(None, on_gpu, backend, EngineConfig(max_model_len=64)) is None
    assert "kivi4 seals blocks while it writes" in caplog.text
