"""Evicted tokens wait in cold pages and come back: attention, places, sharing, limits, refusals."""

from __future__ import annotations

import pytest
import tiny
import torch
from checking import check_shadow
from recall_shadow import RecallShadow
from settings import EVICTING, assert_idle

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.registry import make_policy
from kvreclaim.engine.compact.job import CompactionJob, CompactionResult
from kvreclaim.errors import InvalidArgumentError, KVReclaimError
from kvreclaim.schedule import EvictionMethod, Pass

TOLERANCE = 1e-5
MODES = ("pass", "tokens:4", "query")
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
RECALLING = tuple(name for name in EVICTING if Signal.TOKEN_SCORES not in make_policy(name).needs)


def small(policy="knorm", recall="pass", blocks=2, **fields):
    """A budget of few blocks of 8; recall with as many blocks."""
    head, bracket, rest = recall.partition("(")
    options = f"blocks={blocks}" + (f",{rest}" if bracket else ")")
    settings = {"budget": 48, "interval": 16, "sinks": 2, "recent": 8, "mode": None, **fields}
    return CompressionConfig(policy, recall=f"{head}({options}", **settings)


@pytest.fixture
def make_cold(make_llm):
    """An engine with cold memory, of blocks of 8 under the reference, of 16 natively."""

    def make(family="llama", **arguments):
        given = {"kv_recall_size": 0.01, "block_size": 8, "max_num_batched_tokens": 32, **arguments}
        return make_llm(family, **given)

    return make


def check_recall(llm, config, monkeypatch, params=GREEDY, lengths=(70, 9, 50), tolerance=TOLERANCE):
    shadow, outputs = check_shadow(llm, config, monkeypatch, params, lengths, RecallShadow, tolerance)
    assert shadow.num_passes
    assert shadow.most_back
    recalls = llm.engine.recalls
    assert not recalls.tables
    recalls.pool.check([])
    return shadow, outputs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", RECALLING)
def test_attends_to_what_stays_and_what_is_back(policy, mode, make_cold, monkeypatch):
    llm = make_cold()
    fields = {"interval": 32} if make_policy(policy).query_window > 16 else {}
    check_recall(llm, small(policy, mode, **fields), monkeypatch)
    assert llm.engine.totals.recall_pages
    assert (
        llm.engine.totals.recall_bytes == llm.engine.totals.recall_pages * llm.engine.recalls.pool.unit_bytes
    )


@pytest.mark.parametrize(
    "recall",
    [
        "pass(packing=pca)",
        "query(packing=kmeans)",
        "pass(source=mixture)",
        "pass(source=both)",
        "pass(source=random)",
        "query(source=random)",
        "tokens(every=3,source=mixture)",
        "query(digest=centroid)",
        "tokens(every=3,digest=cuboid_mean)",
    ],
)
def test_every_option(recall, make_cold, monkeypatch):
    check_recall(make_cold(), small("query_mixture", recall), monkeypatch)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "int8", "int4", "fp8", "turboquant4", "int8+int4"])
def test_every_format(kv_format, kernels, make_cold, monkeypatch):
    llm = make_cold(kv_cache_dtype=kv_format, kernels=kernels, block_size=16)
    config = small("snapkv(window=8)", "query", budget=96, interval=32)
    tolerance = TOLERANCE if kv_format == "fp32" else 2e-2
    check_recall(llm, config, monkeypatch, lengths=(150, 100), tolerance=tolerance)


@pytest.mark.parametrize("mode", ["pass", "query"])
@pytest.mark.parametrize("family", ["qwen3", "phi3", "glm4", "olmo2", "qwen3-moe", "gemma3", "llama4"])
def test_other_families(family, mode, make_cold, monkeypatch):
    check_recall(make_cold(family), small("knorm", mode), monkeypatch)


@pytest.mark.parametrize("mode", MODES)
def test_blocks_are_those_of_the_same_policy(mode, make_cold):
    """Recalled tokens stand inside the budget: not one block more, at any time."""
    prompts = tiny.prompts((70, 9, 50), seed=3)

    def cost(recall):
        llm = make_cold()
        config = (
            small("knorm", mode) if recall else CompressionConfig("knorm", 48, interval=16, sinks=2, recent=8)
        )
        return [
            (
                out.metrics.peak_blocks,
                out.metrics.answer_blocks,
                out.metrics.compactions,
                out.metrics.tokens_evicted,
            )
            for out in llm.generate(prompts, GREEDY, config)
        ]

    given, plain = cost(True), cost(False)
    assert [one[0] for one in given] == [one[0] for one in plain]
    if mode == "pass":
        assert [one[3] for one in given] == [one[3] for one in plain]


@pytest.mark.parametrize("packing", ["time", "pca", "kmeans"])
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_everything_back_is_the_full_cache(kernels, packing, make_cold):
    """A pass after which every loser is back changes nothing but the order of the slots."""
    llm = make_cold(kernels=kernels, block_size=16, max_num_batched_tokens=512)
    (prompt,) = tiny.prompts((144,), seed=4)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
    full = llm.generate([prompt], params, None)[0].outputs[0]
    recall = f"pass(blocks=7,packing={packing})"
    config = CompressionConfig("random", 144, interval=112, sinks=0, recent=4, recall=recall)
    engine = llm.engine
    request = engine.add_request("r", prompt, params, llm.compressor(config))
    while not request.prompt_done:
        engine.step()
    (seq,) = request.sequences
    blocks = tuple(engine.memory.blocks(seq.seq_id))
    plan = Pass(seq.seq_id, EvictionMethod.COMPACT, blocks, blocks, 144, 144, 144, 144, first=True)
    (done,) = engine.compression.run([CompactionJob(seq, request.compressor, plan)])
    assert isinstance(done, CompactionResult), done
    assert done.kept.shape[-1] == 144 - 7 * 16
    positions = seq.state.slot_positions
    assert not (positions.diff(dim=-1) > 0).all(), "nothing has moved"
    assert (positions.sort(-1).values == torch.arange(144)).all()
    while not request.finished:
        engine.step()
    assert seq.token_ids[144:] == list(full.token_ids)
    for found, wanted in zip(seq.logprobs, full.logprobs, strict=True):
        assert {t: pytest.approx(one.logprob, abs=1e-4) for t, one in wanted.items()} == {
            t: one.logprob for t, one in found.items()
        }


def test_forks_share_pages_by_count(make_cold, monkeypatch):
    llm = make_cold()
    params = SamplingParams(temperature=1.0, n=3, max_tokens=40, seed=1, ignore_eos=True)
    shared = []
    fork = llm.engine.recalls.fork

    def watched(parent_id, child_id):
        fork(parent_id, child_id)
        recalls = llm.engine.recalls
        shared.append(parent_id in recalls.tables)
        recalls.pool.check([table.held for table in recalls.tables.values()])

    monkeypatch.setattr(llm.engine.recalls, "fork", watched)
    _, outputs = check_recall(llm, small("knorm"), monkeypatch, params, lengths=(70, 60))
    assert any(shared), "no fork had pages"
    assert all(len(one.token_ids) == 40 for out in outputs for one in out.outputs)


@pytest.mark.parametrize("mode", MODES)
def test_company_changes_nothing(mode, make_cold):
    """Alone, together, and cut into other chunks: the same pages come back."""
    prompts, config = tiny.prompts((70, 41, 50), seed=6), small("snapkv(window=8)", mode)
    together = make_cold().generate(prompts, GREEDY, config)
    alone = [make_cold().generate([prompt], GREEDY, config)[0] for prompt in prompts]
    assert [out.outputs[0].token_ids for out in together] == [out.outputs[0].token_ids for out in alone]


def answers(llm, config, *, every=0, n=1, times=1000):
    """Tokens and log-probabilities of two requests, both preempted every so many steps, so many times, back
    at once."""
    engine, scheduler = llm.engine, llm.engine.scheduler
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=50, ignore_eos=True, logprobs=0, n=n)
    prompts = tiny.prompts((70, 37), seed=8)
    compressor = llm.compressor(config)
    requests = [engine.add_request(f"r{i}", each, params, compressor) for i, each in enumerate(prompts)]
    decide, had_pages = scheduler._decide, []

    def preempting(step):
        step_no = engine.totals.steps
        if every and step_no % every == every - 1 and step_no < every * times:
            had_pages.extend(seq.seq_id in engine.recalls.tables for seq in scheduler.running)
            for victim in list(reversed(scheduler.running)):
                scheduler.preemptor.preempt([victim], victim, "itself", step)
        decide(step)

    scheduler._decide = preempting
    while engine.has_unfinished:
        engine.step()
        engine.recalls.pool.check([table.held for table in engine.recalls.tables.values()])
    del scheduler._decide
    assert [request.error for request in requests] == [None, None]
    assert any(had_pages) == bool(every)
    assert_idle(llm)
    seqs = [seq for request in requests for seq in request.sequences]
    return [seq.token_ids for seq in seqs], [
        [entry.logprob for drawn in seq.logprobs for entry in drawn.values()] for seq in seqs
    ]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["knorm", "h2o", "snapkv(window=8)"])
def test_swapped_sequences_keep_their_pages(policy, mode, n, make_cold):
    if n > 1 and mode != "pass":
        pytest.skip("refused: test_refusals_say_what_to_do")
    config = small(policy, mode)
    host = {"kv_offloading_size": 0.01, "preemption_mode": "swap", "swap_space": 0.01}
    llm = make_cold(**host)
    assert answers(llm, config, every=7, n=n) == answers(make_cold(), config, n=n)
    assert llm.engine.totals.swaps > 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["knorm", "h2o", "snapkv(window=8)"])
def test_recomputed_sequences_choose_the_same_pages(policy, mode, make_cold):
    config, llm = small(policy, mode), make_cold(preemption_mode="recompute")
    tokens, logprobs = answers(llm, config, every=45, times=1)
    wanted, expected = answers(make_cold(), config)
    assert llm.engine.totals.num_preemptions
    assert tokens == wanted
    for found, given in zip(logprobs, expected, strict=True):
        assert found == pytest.approx(given, abs=1e-4)


def test_abort_frees_pages(make_cold):
    llm = make_cold()
    (prompt,) = tiny.prompts((70,), seed=3)
    llm.engine.add_request("r", prompt, GREEDY, llm.compressor(small()))
    while not llm.engine.recalls.tables:
        llm.engine.step()
    assert llm.engine.recalls.pool.bytes_in_use
    llm.engine.abort("r")
    assert not llm.engine.recalls.pool.bytes_in_use
    assert_idle(llm)


@pytest.mark.parametrize("mode", MODES)
def test_a_bound_drops_the_least_promising_pages(mode, make_cold, monkeypatch):
    unit = make_cold().engine.recalls.pool.unit_bytes
    llm = make_cold(kv_recall_size=60 * unit / 2**30)
    shadow, _ = check_recall(llm, small("knorm", mode), monkeypatch, lengths=(70, 64))
    assert llm.engine.totals.cold_dropped
    assert shadow.num_passes


def test_a_request_that_finds_no_cold_memory_ends_alone(make_cold):
    unit = make_cold().engine.recalls.pool.unit_bytes
    llm = make_cold(kv_recall_size=30 * unit / 2**30)
    outputs = llm.generate(tiny.prompts((70, 64, 60), seed=3), GREEDY, small("knorm"))
    errors = [out.error for out in outputs if out.error]
    assert 0 < len(errors) < 3
    assert all("raise kv_recall_size" in error for error in errors)
    assert_idle(llm)
    llm.engine.recalls.pool.check([])


def test_a_failed_step_is_tried_again_with_the_same_pages(make_cold, monkeypatch):
    prompts, config = tiny.prompts((70, 60), seed=6), small("knorm", "query")
    wanted = make_cold().generate(prompts, GREEDY, config)
    llm = make_cold()
    model, calls = llm.engine.runner.model, []
    forward = model.lm_head.forward

    def failing(*args):
        calls.append(1)
        if len(calls) % 7 == 0:
            raise RuntimeError("a test's own failure")
        return forward(*args)

    monkeypatch.setattr(model.lm_head, "forward", failing)
    found = llm.generate(prompts, GREEDY, config)
    assert [out.error for out in found] == [None, None]
    assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in wanted]


def test_hits_count_pages_that_won(make_cold):
    """Under the random policy recalled tokens win as often as others."""
    llm = make_cold()
    llm.generate(tiny.prompts((70,), seed=3), GREEDY, small("random"))
    assert llm.engine.totals.recall_hits


REFUSED = {
    "kv_recall_size is 0": ({"kv_recall_size": 0}, {}, {}),
    "make it a multiple": ({}, {"budget": 47}, {}),
    "leave no place": ({}, {"budget": 24}, {}),
    "raise it to 16": ({}, {"interval": 8}, {}),
    "n=1 without beams": ({}, {"recall": "query"}, {"n": 2, "temperature": 1.0}),
    "holds its own tokens": ({}, {"mode": "union"}, {}),
    "protect_prompt": ({}, {"protect_prompt": True}, {}),
    "does not move": ({}, {"policy": "paged_eviction"}, {}),
    "positions=original": ({}, {"policy": "streaming_llm(positions=cache)"}, {}),
    "weighs what came back": ({}, {"policy": "snapkv(when=prefill)"}, {}),
    "use surrogate": ({}, {"policy": "kvzap"}, {}),
    "write pass, tokens:N or query": ({}, {"recall": "always"}, {}),
    "out of place": ({}, {"recall": "pass(window=3)"}, {}),
    "start without speculative_config": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {},
        {},
    ),
    "verify is set with recall": ({}, {"verify": True}, {}),
    "loses nothing that could be recalled": ({"full_cache_host_size": 0.1}, {}, {}),
    "one sequence needs": ({"kv_recall_size": 1e-5}, {}, {}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_say_what_to_do(words, make_cold):
    engine, fields, sampling = REFUSED[words]
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **sampling})
    with pytest.raises(KVReclaimError, match=words) as refused:
        make_cold(**engine).generate(tiny.prompts((20,), seed=1), params, small(**fields))
    assert isinstance(refused.value, InvalidArgumentError)


@pytest.mark.parametrize("family", ["mistral", "deepseek-v2"])
def test_models_that_it_is_not_for(family, make_cold):
    with pytest.raises(InvalidArgumentError, match="recall 'pass' is refused"):
        make_cold(family).generate(tiny.prompts((20,), seed=1), GREEDY, small())


def test_compress_prompt_at_is_refused(make_cold):
    llm = make_cold()
    (prompt,) = tiny.prompts((70,), seed=3)
    with pytest.raises(InvalidArgumentError, match="compress_prompt_at keeps its result"):
        llm.engine.add_request("r", prompt, GREEDY, llm.compressor(small()), compress_prompt_at=60)
