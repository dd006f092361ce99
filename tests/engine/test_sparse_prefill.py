"""Prompts that read some of the blocks before them: each head the right ones, and no effect on others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
from checking import logprobs, tokens
from prefill_shadow import PrefillShadow
from settings import assert_idle, small, with_options

from kvreclaim import SamplingParams
from kvreclaim.calibrate.prefill_patterns import find_patterns
from kvreclaim.compression.prefill.minference import AShape, BlockSparse
from kvreclaim.compression.prefill.per_head import Patterns
from kvreclaim.errors import InvalidArgumentError

POOLED = "pooled(alpha=0.9, rows=16, first=24, last=6, layers=0, block=8, sinks=1, local=1)"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
LENGTHS = (150, 9, 83)
SMALL = {"block_size": 8, "max_num_batched_tokens": 48, "max_num_seqs": 8}
EVERY_WAY = (
    None,
    "query_mixture",
    "snapkv(window=3)",
    "h2o",
    "kvzap",
    "shares(surrogate, floor=0.2)",
    "ada_kv(snapkv(window=2), alpha=0)",
    "paged_eviction",
    "quest",
    "streaming_llm(positions=cache)",
)


def by(method, prompts):
    return with_options(prompts, sparse_prefill=method)


def check_shadow(llm, monkeypatch, config=None, method=POOLED, lengths=LENGTHS, off=1e-5):
    shadow = PrefillShadow(llm, monkeypatch)
    outputs = llm.generate(by(method, tiny.prompts(lengths, seed=3)), GREEDY, config)
    assert [out.error for out in outputs] == [None] * len(lengths)
    assert shadow.worst <= off, f"attention is off by {shadow.worst:.2e} in {shadow.num_calls} calls"
    assert shadow.prefill_tiles > 0
    assert shadow.blocks_left_out > 0
    assert_idle(llm)
    return outputs


@pytest.mark.parametrize("family", [f for f in tiny.FAMILIES if f != "mistral"])
def test_each_head_reads_the_blocks_that_meet_its_queries(family, make_llm, monkeypatch):
    (long, short, other) = check_shadow(make_llm(family, **SMALL), monkeypatch)
    assert short.metrics.prefill_share is None
    assert 0 < long.metrics.prefill_share < 1
    assert 0 < other.metrics.prefill_share < 1


@pytest.mark.parametrize("policy", EVERY_WAY)
def test_beside_every_way_of_compressing(policy, make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, **SMALL)
    config = None if policy is None else small(policy, budget=40, interval=16)
    check_shadow(llm, monkeypatch, config)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "fp8_e4m3", "turboquant4", "int8+int4"])
def test_formats(form, kernels, make_llm, monkeypatch):
    llm = make_llm("qwen3", kv_cache_dtype=form, kernels=kernels, block_size=16, max_num_batched_tokens=80)
    method = POOLED.replace("block=8", "block=16")
    check_shadow(llm, monkeypatch, method=method, off=1e-4)


@pytest.mark.parametrize(
    "method",
    [
        "pooled(alpha=0)",
        "pooled(sinks=16, local=16)",
        "a_shape",
        "vertical_slash(vertical=4096)",
        "block_sparse(top=8)",
    ],
)
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_what_covers_everything_is_dense(method, kernels, make_llm):
    """Bit for bit, and as exact: others find its prefix."""
    prompts = tiny.prompts((430, 90), seed=1)
    llm = make_llm(kernels=kernels, max_num_batched_tokens=300, max_num_seqs=8)
    method = f"{method.rstrip(')')}{', ' if '(' in method else '('}first=0, last=1, layers=0)"
    sparse = llm.generate(by(method, prompts), GREEDY)
    assert [out.metrics.prefill_share for out in sparse] == [None, None]
    assert llm.generate(by("dense", prompts), GREEDY)[0].metrics.num_cached_tokens == 416
    plain = make_llm(kernels=kernels, max_num_batched_tokens=300, max_num_seqs=8)
    dense = plain.generate(prompts, GREEDY)
    assert tokens(sparse) == tokens(dense)
    assert logprobs(sparse) == logprobs(dense)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_tiles_that_read_everything_give_the_bits_of_dense_layers(kernels, make_llm):
    """A threshold that no block lies under, and the same chunks in layers that are computed densely."""
    prompts = tiny.prompts((430, 90), seed=1)
    llm = make_llm(kernels=kernels, max_num_batched_tokens=300, max_num_seqs=8, enable_prefix_caching=False)
    text = "pooled(alpha=1e-30, first=0, last=1, layers={}, block=16)"
    sparse, dense = (llm.generate(by(text.format(layers), prompts), GREEDY) for layers in (0, 9))
    assert [out.metrics.prefill_share for out in (*sparse, *dense)] == [1.0] * 4
    assert tokens(sparse) == tokens(dense)
    assert logprobs(sparse) == logprobs(dense)


@pytest.mark.parametrize(
    "method",
    [
        POOLED,
        "a_shape(first=24, last=6, layers=0, sinks=8, local=16, block=8)",
        "vertical_slash(first=24, last=6, layers=0, vertical=16, slash=32, block=8, every=64)",
        "block_sparse(first=24, last=6, layers=0, block=8, top=3)",
    ],
)
def test_how_a_prompt_is_cut_changes_nothing(method, make_llm):
    """No chunks, prefix hits, preemption or company change it."""
    bare = tiny.prompts((150, 210, 330), seed=7)
    prompts, params = by(method, bare), replace(GREEDY, max_tokens=60)
    sizes = {"block_size": 8, "num_blocks": 200, "max_num_seqs": 8, "max_model_len": 400}
    whole = make_llm(max_num_batched_tokens=2048, **sizes)
    calm = whole.generate(prompts, params)
    assert calm[2].metrics.prefill_share < 0.9
    warm = whole.generate(prompts, params)
    assert [out.metrics.num_cached_tokens for out in warm] >= [128, 192, 320]
    chunked = make_llm(max_num_batched_tokens=80, **sizes)
    dense, sparse = tiny.prompts((30, 60), seed=9)
    beside = chunked.generate([*prompts, dense, *by(method, [sparse])], params)
    tight = make_llm(max_num_batched_tokens=80, **sizes | {"num_blocks": 58}).generate(prompts, params)
    assert sum(out.metrics.preemptions for out in tight) > 0
    for other in (warm, beside[:3], tight):
        assert tokens(other) == tokens(calm)
        torch.testing.assert_close(
            torch.tensor(logprobs(other)), torch.tensor(logprobs(calm)), atol=1e-4, rtol=0
        )
    assert tokens(calm) != tokens(whole.generate(bare, params)), "the blocks that are left out matter"


def test_each_method_finds_its_own_prefixes_alone(make_llm):
    """Requests with another one, or with none, compute, and the exact index holds nothing of it."""
    prompt = tiny.prompts((150,), seed=7)
    llm = make_llm(**SMALL)
    methods = POOLED, "dense", POOLED.replace("0.9", "0.5")
    cold = {method: tokens(make_llm(**SMALL).generate(by(method, prompt), GREEDY)) for method in methods}
    for method in (*methods, methods[1], methods[0], methods[2]):
        seen = cold[method] is None
        (out,) = llm.generate(by(method, prompt), GREEDY)
        assert (out.metrics.num_cached_tokens > 0) == seen
        if not seen:
            assert tokens([out]) == cold[method]
            cold[method] = None
    (out,) = llm.generate(with_options(prompt, cache_salt="pooled"), GREEDY)
    assert out.metrics.num_cached_tokens == 0


def test_the_engine_says_it_for_all_and_a_request_for_itself(make_llm):
    prompt = tiny.prompts((150,), seed=7)
    llm = make_llm(sparse_prefill=POOLED, **SMALL)
    named = make_llm(**SMALL).generate(by(POOLED, prompt), GREEDY)
    assert tokens(llm.generate(prompt, GREEDY)) == tokens(named)
    assert llm.generate(by("dense", prompt), GREEDY)[0].metrics.prefill_share is None


@pytest.mark.parametrize(
    ("method", "params", "config", "message"),
    [
        ("pooled(first=1", {}, None, "sparse prefill 'pooled\\(first=1' is no name"),
        ("xattention", {}, None, "'xattention' is unknown; known are dense, pooled, a_shape, vertical_slash"),
        ("pooled(beta=1)", {}, None, "is given 'beta'; its options, each written option=value, are first"),
        ("pooled(alpha=2)", {}, None, "option alpha is 2; pass a number from 0 to 1"),
        ("pooled(block=12)", {}, None, r"blocks of 12 tokens, .* such as pooled\(block=16\)"),
        ("pooled(rows=512, local=0)", {}, None, "decides on 256 tokens at once, .* raise it to 264"),
        ("minference", {}, None, "needs a pattern for each head; write minference"),
        (POOLED, {"prompt_logprobs": 1}, None, "only approximates"),
    ],
)
def test_what_cannot_be_served_is_refused(method, params, config, message, make_llm):
    llm = make_llm(**SMALL)
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate(by(method, tiny.prompts((20,))), replace(GREEDY, **params), config)
    assert_idle(llm)


def test_a_method_that_gains_nothing_is_not_switched_on_for_all(make_llm):
    with pytest.raises(InvalidArgumentError, match="takes about as long as dense attention does"):
        make_llm(sparse_prefill="vertical_slash")


def test_layers_with_windows_in_the_same_table_are_refused(make_llm):
    with pytest.raises(InvalidArgumentError, match="does not work in layers with a sliding window"):
        make_llm("mistral", sparse_prefill=POOLED, **SMALL)


def test_triton_kernels(make_llm):
    """In Triton's interpreter: the tables are those of any other batch over cells."""
    prompts = by(POOLED.replace("block=8", "block=16"), tiny.prompts((100,), seed=7))
    params = replace(GREEDY, max_tokens=3)
    sizes = {"num_blocks": 20, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    found = [
        make_llm("qwen3", kernels=kernels, **sizes).generate(prompts, params)
        for kernels in ("reference", "triton")
    ]
    assert found[0][0].metrics.prefill_share == found[1][0].metrics.prefill_share < 1
    assert tokens(found[0]) == tokens(found[1])


class TestPatterns:
    """A pattern for each head, from a file."""

    @pytest.fixture
    def llm(self, make_llm):
        return make_llm(max_num_batched_tokens=1200, max_num_seqs=8, num_blocks=100)

    def test_calibration_finds_the_pattern_that_reads_most(self, llm, tmp_path, monkeypatch):
        """Where a candidate reads everything, it is every head's; the file holds the same again."""
        everything = (
            AShape(sinks=64, local=64, block=64, layers=0, last=1),
            BlockSparse(top=100, block=64, layers=0, last=1),
        )
        monkeypatch.setattr("kvreclaim.calibrate.prefill_patterns.candidates", lambda *_: everything)
        found = find_patterns(llm, tiny.prompts((500, 430), seed=1), budget=128, span=64)
        assert found.heads == ((1, 1), (1, 1))
        found.save(tmp_path / "heads.json")
        assert Patterns.load(tmp_path / "heads.json").heads == found.heads
        assert_idle(llm)

    def test_each_head_reads_by_its_own(self, llm, tmp_path):
        """Heads that all read by one pattern answer as that method does; others read in between."""
        prompts = tiny.prompts((450,), seed=2)
        shape = AShape(sinks=64, local=64, block=64)
        top = BlockSparse(top=2, block=64)
        common = "first=128, last=8, layers=0, block=64"
        answers = {}
        for name, heads in (("a", ((0, 0),) * 2), ("b", ((1, 1),) * 2), ("mixed", ((0, 1),) * 2)):
            path = tmp_path / f"{name}.json"
            Patterns(llm.engine.groups.facts.fingerprint, (shape, top), heads).save(path)
            method = f"minference(heads='{path}', {common})"
            answers[name] = llm.generate(by(method, prompts), GREEDY)
        for name, method in (
            ("a", f"a_shape(sinks=64, local=64, {common})"),
            ("b", f"block_sparse(top=2, {common})"),
        ):
            alone = llm.generate(by(method, prompts), GREEDY)
            assert tokens(alone) == tokens(answers[name])
            assert alone[0].metrics.prefill_share == answers[name][0].metrics.prefill_share
        shares = [answers[name][0].metrics.prefill_share for name in ("a", "b", "mixed")]
        assert min(shares[:2]) < shares[2] < max(shares[:2])

    def test_what_is_of_another_model_or_no_file_is_refused(self, llm, tmp_path):
        path = tmp_path / "heads.json"
        Patterns("another", (AShape(block=64),), ((0, 0), (0, 0))).save(path)
        method = f"minference(heads='{path}', local=0)"
        for text, message in (
            (f"minference(heads='{path}')", "are those of another model"),
            (f"minference(heads='{path}', block=128)", r"among \[64\]; write block=64"),
            (method, "is given 'local'"),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                llm.generate(by(text, tiny.prompts((20,))), GREEDY)

    def test_documents_shorter_than_what_is_read_tell_nothing(self, llm):
        with pytest.raises(InvalidArgumentError, match="the longest has 100 tokens, and each reads 128"):
            find_patterns(llm, tiny.prompts((100,)), budget=128, span=64)
