"""Scores of hidden states: what transformers' own give, kept beside every slot wherever it goes."""

from __future__ import annotations

import pytest
import tiny
import torch
from checking import tokens
from score_shadow import ScoreShadow
from settings import assert_idle, small, with_options
from transformers import AutoModelForCausalLM

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression.policies.kvzap import KVzap
from kvreclaim.engine.signals.slot_scores import DTYPE, score_bytes
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.formats import FORMATS

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
POLICIES = ("kvzap", "shares(kvzap)", "shares(kvzap,by=static)", "ada_kv(kvzap)")


def config(policy: str = "kvzap", **fields) -> CompressionConfig:
    return small(policy, **{"budget": 32, "interval": 8, **fields})


def watched(llm, monkeypatch, prompts, params=GREEDY, settings=None):
    """Run them under the shadow. Returns: it, and the outputs."""
    shadow = ScoreShadow(llm, monkeypatch)
    outputs = llm.generate(prompts, params, settings or config())
    assert [out.error for out in outputs] == [None] * len(prompts)
    assert shadow.wrong == []
    assert shadow.worst <= 1e-5
    assert shadow.num_compared > 0
    assert_idle(llm)
    return shadow, outputs


@pytest.mark.parametrize("form", ["linear", "mlp"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "deepseek-v3"])
def test_scores_are_what_the_weights_make_of_hidden_states(family, form, tiny_dir, monkeypatch):
    """Compared with transformers' own model, by a hook on its attention; here the prompt comes in chunks."""
    llm = LLM(
        tiny_dir(family),
        dtype="float32",
        device="cpu",
        num_blocks=200,
        block_size=8,
        max_num_batched_tokens=24,
        disable_hybrid_kv_cache_manager=True,
    )
    stats = calibrate(llm.loaded, tiny.prompts((150, 150), seed=5), kvzap=form)
    seen: dict[int, torch.Tensor] = {}

    def score(_, view):
        seen.setdefault(view.layer, view.signals.token_scores)
        return view.signals.token_scores

    monkeypatch.setattr(KVzap, "score", score)
    prompt = tiny.prompts((60,), seed=3)[0]
    llm.generate([prompt], GREEDY, config(budget=48, interval=64, stats=stats))
    model = AutoModelForCausalLM.from_pretrained(tiny_dir(family), dtype=torch.float32).eval()
    hidden: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: hidden.append(kwargs.get("hidden_states", args[0] if args else None)[0]),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(torch.tensor([prompt]), use_cache=False)
    assert sorted(seen) == list(range(len(hidden)))
    for layer, rows in enumerate(hidden):
        inner, outer = (None if x is None else x[layer] for x in (stats.kvzap_in, stats.kvzap_out))
        if inner is not None:
            rows = torch.nn.functional.gelu(rows @ inner[:, :-1].T + inner[:, -1])
        wanted = (rows @ outer[:, :-1].T + outer[:, -1]).T
        assert seen[layer].shape[1] >= len(prompt)
        torch.testing.assert_close(seen[layer][:, : len(prompt)], wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_scores_move_with_their_slots(policy, make_llm, monkeypatch):
    llm = make_llm(block_size=8, max_num_batched_tokens=32)
    prompts = tiny.prompts((70, 9, 33), seed=3)
    shadow, outputs = watched(llm, monkeypatch, prompts, settings=config(policy))
    assert outputs[0].metrics.compactions >= 4
    assert shadow.num_passes == sum(out.metrics.compactions for out in outputs)


@pytest.mark.parametrize("policy", ["kvzap", "shares(kvzap)"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_the_cache(name, policy, make_llm, monkeypatch):
    llm = make_llm(block_size=16, max_num_batched_tokens=32, kv_cache_dtype=name)
    shadow = ScoreShadow(llm, monkeypatch)
    outputs = llm.generate(tiny.prompts((70, 33), seed=3), GREEDY, config(policy, interval=16))
    assert [out.error for out in outputs] == [None] * 2
    assert shadow.wrong == []
    assert shadow.num_passes > 2


@pytest.mark.parametrize("policy", POLICIES)
def test_forks_share_and_then_move_their_own(policy, make_llm, monkeypatch):
    params = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=40, ignore_eos=True)
    llm = make_llm(block_size=8, max_num_batched_tokens=64)
    _, outputs = watched(llm, monkeypatch, tiny.prompts((50,), seed=12), params, config(policy))
    assert len(set(map(tuple, tokens(outputs)))) == 3


@pytest.mark.parametrize("policy", ["kvzap", "shares(kvzap)"])
def test_a_hit_brings_its_scores(policy, make_llm, monkeypatch):
    prompts = tiny.prompts((70, 33), seed=3)
    settings = config(policy)
    want = tokens(make_llm(block_size=8, enable_prefix_caching=False).generate(prompts, GREEDY, settings))
    llm = make_llm(block_size=8)
    shadow = ScoreShadow(llm, monkeypatch)
    first = llm.generate(prompts, GREEDY, settings)
    warm = llm.generate(prompts, GREEDY, settings)
    assert tokens(first) == tokens(warm) == want
    assert [out.metrics.num_cached_tokens for out in first] == [0, 0]
    assert [out.metrics.num_cached_tokens for out in warm] == [64, 32]
    assert shadow.wrong == []


def test_blocks_without_scores_or_with_others_are_no_hit(make_llm, tiny_dir):
    """Blocks with scores serve no other request: one salt for each set of weights."""
    llm = make_llm(block_size=8)
    prompts = tiny.prompts((70,), seed=3)
    other = calibrate(llm.loaded, tiny.prompts((150,), seed=6), kvzap="linear")

    def cached(settings, salt=None):
        salted = with_options(prompts, cache_salt=salt)
        return llm.generate(salted, GREEDY, settings)[0].metrics.num_cached_tokens

    llm.generate(prompts, GREEDY)
    assert cached(config()) == 0
    assert cached(config(stats=other)) == 0
    assert cached(config("shares(kvzap)")) == 64
    assert cached(config("shares(kvzap)", stats=other)) == 64
    assert cached(config("knorm")) == 64
    assert [cached(config(), "mine") for _ in range(2)] == [0, 64]


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_computes_them_again(policy, make_llm, monkeypatch):
    prompts = tiny.prompts((20, 19, 18, 17), seed=7)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (160, 100, 100, 100)]
    configs = [None, *[config(policy, interval=16)] * 3]
    calm = make_llm(block_size=8, max_num_batched_tokens=32).generate(prompts, params, configs)
    tight = make_llm(
        block_size=8, num_blocks=38 if policy.startswith("evict") else 30, max_num_batched_tokens=32
    )
    shadow = ScoreShadow(tight, monkeypatch)
    crowded = tight.generate(prompts, params, configs)
    assert sum(out.metrics.preemptions for out in crowded) > 0
    assert tokens(crowded) == tokens(calm)
    assert shadow.wrong == []
    assert_idle(tight)


def test_a_step_that_fails_leaves_no_trace(make_llm, monkeypatch):
    """It is run again one sequence at a time; the slots, and what lies beside them, are written again."""
    llm = make_llm(block_size=8, max_num_batched_tokens=64)
    prompts = tiny.prompts((40, 30), seed=3)
    want = tokens(make_llm(block_size=8, max_num_batched_tokens=64).generate(prompts, GREEDY, config()))
    forward, calls = llm.loaded.model.forward, []

    def failing(*args, **kwargs):
        calls.append(None)
        out = forward(*args, **kwargs)
        if len(calls) in (2, 9, 20):
            raise RuntimeError("once")
        return out

    monkeypatch.setattr(llm.loaded.model, "forward", failing)
    _, outputs = watched(llm, monkeypatch, prompts)
    assert len(calls) > 20
    assert tokens(outputs) == want


def test_who_asks_for_none_pays_nothing(make_llm):
    llm = make_llm(block_size=8)
    prompts = tiny.prompts((40,), seed=3)
    llm.generate(prompts, GREEDY, config("knorm"))
    assert llm.engine.signals.scores is None
    llm.generate(prompts, GREEDY, config())
    cache = llm.engine.cache
    slots = cache.num_blocks * cache.block_size * cache.num_layers * cache.num_kv_heads
    assert llm.engine.signals.scores.nbytes == score_bytes(cache) == slots * DTYPE.itemsize
    assert llm.engine.signals.room.used == score_bytes(cache)


def test_scores_without_room_are_refused(make_llm):
    llm = make_llm(block_size=8, max_signal_bytes=1000)
    with pytest.raises(InvalidArgumentError, match=r"scores beside the slots.*max_signal_bytes"):
        llm.generate(tiny.prompts((40,), seed=3), GREEDY, config())
    assert_idle(llm)
