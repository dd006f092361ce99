"""Layers with sliding windows beside full ones, in tables of their own."""

from __future__ import annotations

import odd_policies
import pytest
import tiny
from score_shadow import ScoreShadow
from settings import assert_idle, small, with_options
from shadow import Shadow
from signal_shadow import SignalShadow
from sparse_shadow import SparseShadow
from test_uneven import tokens

from kvreclaim import LLM, BeamSearchParams, SamplingParams
from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.windows import ChunkedWindow, Window

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
GROUPED = tiny.GROUPED
CODED = ("int8", "int4", "fp8_e4m3", "turboquant4")
POLICIES = (
    "knorm",
    "query_mixture",
    "snapkv(window=3)",
    "tova",
    "h2o",
    "paged_eviction",
    "ada_kv(snapkv(window=3),alpha=0)",
    "pyramidkv(query_mixture)",
    "quest",
    "kvzap",
    "segments(keydiff)",
)


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    odd_policies.register(monkeypatch)


def deep(family: str) -> dict[str, int]:
    """Layers enough for several groups of windows."""
    return {"num_hidden_layers": 8 if family == "gemma3" else 4}


class EveryShadow(SparseShadow, ScoreShadow, SignalShadow):
    """All that the shadows check."""


@pytest.mark.parametrize("family", GROUPED)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_over_the_layers_with_full_attention(family, policy, make_llm, monkeypatch):
    llm = make_llm(family, block_size=8, max_num_batched_tokens=32)
    assert llm.engine.groups.windows
    shadow = EveryShadow(llm, monkeypatch)
    config = small(policy, budget=40, interval=8)
    outputs = llm.generate(tiny.prompts((70, 9, 33), seed=3), GREEDY, config)
    assert [out.error for out in outputs] == [None] * 3
    assert shadow.worst <= 1e-5, f"attention is off by {shadow.worst:.2e} in {shadow.num_calls} calls"
    assert not shadow.wrong
    assert_idle(llm)
    if policy != "quest":
        assert outputs[0].metrics.compactions >= 2
        assert outputs[0].metrics.blocks_freed > 0


def test_a_model_of_windows_alone_gives_back_what_lies_behind_them(make_llm, tiny_dir):
    """Tokens as ever, in the blocks of the window and of a chunk; its prompts are hit as long as the pool has
    room."""
    llm = make_llm("mistral", block_size=4, max_num_batched_tokens=16, num_blocks=60)
    assert llm.engine.groups.trailing == Window(tiny.WINDOW, 1)
    prompts = tiny.prompts((90, 61), seed=3)
    held = []
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    outputs = llm.generate(prompts, params, on_step=lambda step: held.append(step.blocks_in_use))
    assert tokens(outputs) == tiny.greedy(tiny_dir("mistral"), prompts, 70)
    assert max(held) <= 2 * Window(tiny.WINDOW, 1).most_blocks(160, 16, 4)
    assert max(held[40:]) <= 2 * Window(tiny.WINDOW, 1).most_blocks(160, 1, 4) == 6
    again = llm.generate(prompts[1], params)
    assert again[0].metrics.num_cached_tokens > 0 or llm.engine.memory.stats().prefix_evictions > 0
    assert tokens(again) == tokens(outputs)[1:]
    assert_idle(llm)


@pytest.mark.parametrize("family", GROUPED)
def test_what_is_held_is_what_the_formula_says(family, make_llm):
    llm = make_llm(family, block_size=4, max_num_batched_tokens=16)
    (window,) = llm.engine.groups.windows
    held = []
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    llm.generate(tiny.prompts((90,)), params, on_step=lambda step: held.append(step.blocks_in_use))
    is_chunk = isinstance(window, ChunkedWindow)
    tables = window.num_blocks * (tiny.CHUNK // 4 if is_chunk else blocks_for(tiny.WINDOW - 1, 4) + 1)
    assert max(held[10:]) <= blocks_for(160, 4) + tables
    assert held[-2] >= blocks_for(158, 4) + tables - window.num_blocks
    assert len(set(held[10:])) > 1 + is_chunk, "a chunk's end gives its blocks back"


@pytest.mark.parametrize("family", GROUPED)
@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp8_e4m3", "turboquant4", "bf16", "int8+int4"])
def test_formats(family, kv_format, make_llm, monkeypatch):
    llm = make_llm(
        family, block_size=16, max_num_batched_tokens=32, kv_cache_dtype=kv_format, kernels="native"
    )
    shadow = Shadow(llm, monkeypatch)
    prompts = tiny.prompts((70, 9, 33), seed=3)
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, small("knorm", budget=48, interval=16))
        assert [out.error for out in outputs] == [None] * 3
    assert not shadow.wrong
    assert shadow.num_hits
    assert shadow.worst <= 2e-2 if kv_format == "bf16" else 1e-3


@pytest.mark.parametrize(
    ("family", "kernels", "dtype", "kv_format"),
    [
        *(("gemma2", "native", "float32", form) for form in CODED),
        *(("gpt-oss", "native", dtype, form) for form in CODED for dtype in ("float32", "bfloat16")),
        *(("llama4", "reference", "float32", form) for form in CODED),
        ("gemma3", "reference", "float32", "int4"),
    ],
)
def test_windows_keep_the_models_dtype_beside_codes(family, kernels, dtype, kv_format, make_llm, monkeypatch):
    """Their blocks have the same bytes, so fewer tokens, several for a block of the full layers."""
    parts = (4 if dtype == "float32" else 2) * (1 if kv_format in ("int8", "fp8_e4m3") else 2)
    size = 16 * parts if kernels == "native" else 16
    llm = make_llm(
        family,
        block_size=size,
        max_num_batched_tokens=32,
        num_blocks=1500,
        kernels=kernels,
        dtype=dtype,
        kv_cache_dtype=kv_format,
        kv_cache_dtype_skip_layers=["sliding_window"],
    )
    assert llm.engine.groups.parts == parts
    for place, layer in zip(llm.engine.groups.places, llm.engine.runner.layers, strict=True):
        assert layer.cache.format.is_plain is bool(place.table)
        assert layer.cache.block_size == (size // parts if place.table else size)
    shadow = Shadow(llm, monkeypatch)
    prompts = tiny.prompts((170, 9, 33), seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for policy in ("knorm", "ada_kv(snapkv(window=3),alpha=0)"):
        outputs = llm.generate(prompts, params, small(policy, budget=size, interval=size))
        assert [out.error for out in outputs] == [None] * 3
    assert not shadow.wrong
    assert shadow.num_hits
    # Queries that are stretched along directions are rounded to bf16 once more than the shadow's.
    assert shadow.worst <= (1e-3 if dtype == "float32" else 6e-2)
    assert_idle(llm)


def test_formats_that_hold_nothing_else_are_refused(make_llm):
    skip = {"kv_cache_dtype_skip_layers": "sliding_window"}
    for family, options, message in (
        ("gemma2", {}, "kv_cache_dtype is fp32, beside which no other is kept"),
        (
            "gemma2",
            {"kv_cache_dtype": "int4", "block_size": 12},
            "8 times the bytes of int4, but block_size is 12",
        ),
        ("gemma2", {"kv_cache_dtype": "int8+int4"}, "numbers of keys and values differ in size"),
        (
            "gemma2",
            {"kv_cache_dtype": "int8"},
            "holds 4, which native kernels do not serve .* block_size to 64",
        ),
        ("llama", {"kv_cache_dtype": "int8"}, "all layers share one block table; leave it out"),
        ("mistral", {"kv_cache_dtype": "int8"}, "all layers have windows; leave it out"),
        (
            "gemma2",
            {"kv_cache_dtype": "int8", "kv_offloading_size": 0.01},
            "share one block table .kv_offloading",
        ),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            make_llm(family, **options, **skip)
    with pytest.raises(InvalidArgumentError, match=r"kv_cache_dtype_skip_layers is .* sliding_window"):
        make_llm("gemma2", kv_cache_dtype="int8", kv_cache_dtype_skip_layers=["0"])


def test_hits_and_forks(make_llm, monkeypatch):
    llm = make_llm("gemma3", block_size=4, num_blocks=600, max_num_batched_tokens=32)
    shadow = Shadow(llm, monkeypatch)
    prompts = tiny.prompts((70, 40), seed=4)
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    first = llm.generate(prompts, params)
    again = llm.generate(prompts, params)
    assert tokens(first) == tokens(again)
    assert [out.metrics.num_cached_tokens for out in again] == [68, 36]
    assert not shadow.wrong
    assert shadow.worst <= 1e-5
    assert_idle(llm)


@pytest.mark.parametrize("policy", [None, "knorm", "ada_kv(snapkv(window=3),alpha=0)"])
def test_preemption(policy, make_llm, monkeypatch):
    calm, tight = (
        make_llm("gemma3", block_size=4, num_blocks=count, max_num_batched_tokens=16) for count in (900, 105)
    )
    config = None if policy is None else small(policy, budget=40, interval=8)
    prompts = tiny.prompts((70, 40, 55), seed=4)
    alone = calm.generate(prompts, GREEDY, config)
    shadow = Shadow(tight, monkeypatch)
    outputs = tight.generate(prompts, GREEDY, config)
    assert sum(out.metrics.preemptions for out in outputs) > 0 or policy
    assert tokens(outputs) == tokens(alone)
    assert not shadow.wrong
    assert shadow.worst <= 1e-5
    assert_idle(tight)


@pytest.mark.parametrize("family", GROUPED)
def test_the_next_turn_goes_on_behind_the_answer(family, make_llm):
    llm = make_llm(family, block_size=4, num_blocks=240)
    (prompt,) = tiny.prompts((50,), seed=5)
    (answer,) = llm.generate([prompt], GREEDY)
    ids = answer.outputs[0].token_ids
    (turn,) = llm.generate([[*prompt, *ids, 7, 8, 9]], GREEDY)
    assert turn.metrics.num_cached_tokens == (len(prompt) + len(ids) - 1) // 4 * 4
    (without,) = llm.generate([[*prompt, 7, 8, 9]], GREEDY)
    assert without.metrics.num_cached_tokens == (len(prompt) - 1) // 4 * 4
    assert_idle(llm)


def test_beams(make_llm):
    found = {}
    for off in (True, None):
        llm = make_llm("gemma2", block_size=4, disable_hybrid_kv_cache_manager=off)
        params = BeamSearchParams(beam_width=3, max_tokens=20, num_return_sequences=3, ignore_eos=True)
        (out,) = llm.beam_search(tiny.prompts((30,)), params)
        found[off] = [
            (each.token_ids, pytest.approx(each.sequences_scores, abs=1e-4)) for each in out.outputs
        ]
        assert_idle(llm)
    assert found[True] == found[None]


def test_compressed_prefixes_bring_their_windows(make_llm, monkeypatch):
    llm = make_llm("ministral", block_size=4)
    shadow = Shadow(llm, monkeypatch)
    (prompt,) = tiny.prompts((60,), seed=6)
    config = small("knorm", budget=24, interval=8)
    for tail in ([1, 2], [3, 4, 5]):
        llm.generate(with_options([[*prompt, *tail]], compress_prompt_at=60), GREEDY, config)
    assert llm.engine.scheduler.snapshots.num_hits == 1
    assert shadow.worst <= 1e-5


def test_refusals_name_the_option(make_llm, tmp_path):
    llm = make_llm("gemma2")
    for policy in ("streaming_llm(positions=cache)", "kvzip"):
        with pytest.raises(InvalidArgumentError, match="disable_hybrid_kv_cache_manager"):
            llm.generate(tiny.prompts((30,)), GREEDY, small(policy, budget=20, interval=8))
    with pytest.raises(InvalidArgumentError, match=r"sessions .* disable_hybrid_kv_cache_manager=True"):
        llm.save_session(tiny.prompts((30,))[0], tmp_path / "session")
    with pytest.raises(InvalidArgumentError, match="kv_offloading_size is set"):
        make_llm("gemma2", kv_offloading_size=0.01, disable_hybrid_kv_cache_manager=False)
    assert not make_llm("gemma2", kv_offloading_size=0.01).engine.groups.windows
    assert not make_llm("gemma2", disable_hybrid_kv_cache_manager=True).engine.groups.windows
    assert not make_llm("llama").engine.groups.windows


def test_chunks_take_tables_of_their_own(make_llm):
    for options, message in (
        ({"block_size": 32}, "block_size is 32, but layers of .* attend within chunks of 16 tokens"),
        ({"disable_hybrid_kv_cache_manager": True}, "which takes tables of their own; leave it out"),
        ({"kv_offloading_size": 0.01}, "no places in host memory; leave it out"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            make_llm("llama4", **options)


def test_a_model_of_chunks_alone_is_refused(tmp_path):
    directory = tiny.save_model("llama4", tmp_path, no_rope_layers=[1, 1, 1, 1])
    with pytest.raises(UnsupportedModelError, match="none has full attention"):
        LLM(directory, device="cpu")


def test_prompts_that_end_anywhere_in_a_chunk(make_llm, tiny_dir):
    """Chunks of 16 in steps of 7, 16 and 40 tokens, hit at every block."""
    prompts = tiny.prompts((15, 16, 17, 31, 32, 33, 48, 64), seed=9)
    params = SamplingParams(temperature=0.0, max_tokens=34, ignore_eos=True)
    want = tiny.greedy(tiny_dir("llama4"), prompts, 34)
    for most in (7, 16, 40):
        llm = make_llm("llama4", block_size=4, num_blocks=2000, max_num_batched_tokens=most)
        for cut in (0, 1, 3, 8):
            again = [[*prompt, *answer[: 4 * cut]] for prompt, answer in zip(prompts, want, strict=True)]
            outputs = llm.generate(again, params)
            assert [t[: 34 - 4 * cut] for t in tokens(outputs)] == [answer[4 * cut :] for answer in want]
            if cut:
                hits = [out.metrics.num_cached_tokens for out in outputs]
                assert hits == [(len(prompt) - 1) // 4 * 4 for prompt in again]
        assert_idle(llm)
