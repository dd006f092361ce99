"""The first choice of a policy in the engine is the one that transformers' own attention makes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import tiny
import torch
from settings import small
from torch import Tensor

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.policies.snapkv import pool
from kvreclaim.compression.registry import make_policy, policy_names
from kvreclaim.ops.rope import rotate

PARAMS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
BUDGET, SINKS, RECENT = 9, 2, 3
WINDOW = 4


@dataclass(frozen=True)
class FirstPass:
    """Choices of the first compression: kept [L, K, budget] of num_tokens tokens."""

    kept: Tensor
    num_tokens: int


@pytest.fixture
def passes(monkeypatch) -> list[FirstPass]:
    """Every compression's choice, in order."""
    seen: list[FirstPass] = []
    choose_all = Compressor.choose_all

    def watched(compressor, questions, **how):
        choices = choose_all(compressor, questions, **how)
        shape = (compressor.facts.num_layers, compressor.facts.layers[0].num_kv_heads, -1)
        for question, kept in zip(questions, choices, strict=True):
            seen.append(FirstPass(kept.expand(*shape), question.num_tokens))
        return choices

    monkeypatch.setattr(Compressor, "choose_all", watched)
    return seen


@torch.inference_mode()
def attentions(directory, tokens: list[int]) -> Tensor:
    """[L, H, T, T] float64: transformers' own probabilities."""
    out = tiny.load_oracle(directory)(torch.tensor([tokens]), output_attentions=True)
    return torch.stack([layer[0] for layer in out.attentions]).double()


def assert_best(first: FirstPass, scores: Tensor, windows: list[int | None]) -> None:
    """Sinks, recent tokens and those of the highest scores [L, K, T] are kept; scores that differ by less
    than the rounding of fp32 may change places."""
    num_tokens = first.num_tokens
    assert scores.shape[-1] == num_tokens
    free = torch.arange(SINKS, num_tokens - RECENT)
    for layer, window in enumerate(windows):
        for head in range(scores.shape[1]):
            kept = first.kept[layer, head]
            assert len(kept) == BUDGET
            protected = {*range(SINKS), *range(num_tokens - RECENT, num_tokens)}
            assert protected <= set(kept.tolist())
            ours = torch.isin(free, kept)
            worth = scores[layer, head, free].clone()
            if window is not None:
                worth[free <= num_tokens - window] = 0.0
            assert worth[ours].min() >= worth[~ours].max() * (1 - 1e-4)


def tight(policy: str, **options) -> CompressionConfig:
    return small(policy, budget=BUDGET, sinks=SINKS, recent=RECENT, options=options)


def sliding(llm: LLM) -> list[int | None]:
    return [layer.softmax.window for layer in llm.engine.groups.facts.layers]


def over_heads(rows: Tensor, llm: LLM) -> Tensor:
    """[L, H, ...] -> [L, K, G, ...]."""
    return rows.unflatten(1, (llm.loaded.facts.layers[0].num_kv_heads, -1))


def expected_h2o(rows: Tensor, llm: LLM) -> Tensor:
    return over_heads(rows, llm).sum((2, 3))


def expected_tova(rows: Tensor, llm: LLM) -> Tensor:
    heads = llm.loaded.facts.layers[0].num_kv_heads
    return rows[:, :, -1].mean(1, keepdim=True).expand(-1, heads, -1)


def expected_snapkv(rows: Tensor, llm: LLM) -> Tensor:
    sums = rows[:, :, -WINDOW:, :-WINDOW].sum(2)
    pooled = torch.stack([pool(layer, 5, "average") for layer in sums])
    top = pooled.new_full((*pooled.shape[:2], WINDOW), 99.0)
    return over_heads(torch.cat([pooled, top], -1), llm).mean(2)


EXPECTED = {
    "h2o": (expected_h2o, {}),
    "tova": (expected_tova, {}),
    "snapkv": (expected_snapkv, {"window": WINDOW}),
}


@pytest.mark.parametrize("chunk", [32, 200])
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("policy", EXPECTED)
def test_the_first_choice_is_that_of_dense_attention(policy, family, chunk, make_llm, calibrated_dir, passes):
    score, options = EXPECTED[policy]
    shared = None if family == "llama4" else True  # chunks always have tables of their own
    llm = make_llm(family, max_num_batched_tokens=chunk, disable_hybrid_kv_cache_manager=shared)
    prompt = tiny.prompts((61,), seed=2)[0]
    llm.generate(prompt, PARAMS, tight(policy, **options))
    first = passes[0]
    rows = attentions(calibrated_dir(family), prompt[: first.num_tokens])[list(llm.engine.groups.facts.ids)]
    assert_best(first, score(rows, llm), sliding(llm))


@pytest.mark.parametrize("aggregate", ["max", "sum"])
def test_the_oracle_looks_ahead_as_dense_attention_does(aggregate, make_llm, calibrated_dir, passes):
    """A row of full attention, over the tokens that are live at the pass alone."""
    llm = make_llm(max_num_batched_tokens=200)
    prompt, answer = tiny.prompts((50, 30), seed=6)
    llm.score([prompt], [answer], tight("oracle", aggregate=aggregate))
    first = passes[0]
    rows = attentions(calibrated_dir("llama"), prompt + answer[:-1])[
        :, :, first.num_tokens :, : first.num_tokens
    ]
    rows = over_heads(rows / rows.sum(-1, keepdim=True), llm)
    over_queries = rows.amax(3) if aggregate == "max" else rows.sum(3)
    assert_best(first, over_queries.amax(2), sliding(llm))


@pytest.mark.parametrize("policy", ["snapkv", "r_kv"])
def test_the_observation_window_is_always_whole(policy, make_llm, passes):
    """With hardly a recent token protected, the policy itself keeps the tokens that its queries belong to."""
    llm = make_llm(enable_prefix_caching=False)
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    config = small(policy, recent=1, interval=4, options={"window": 12})
    llm.generate(tiny.prompts((61,), seed=2), long, config)
    assert len(passes) > 10
    for each in passes:
        newest = torch.arange(each.num_tokens - 12, each.num_tokens)
        assert torch.equal(each.kept[..., -12:], newest.expand(*each.kept.shape[:2], -1))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_expected_attention_of_calibrated_queries(family, make_llm, passes, monkeypatch):
    """The choice once more, from the statistics and the keys that the model itself puts out."""
    llm = make_llm(family, max_num_batched_tokens=200, disable_hybrid_kv_cache_manager=True)
    prompt = tiny.prompts((61,), seed=2)[0]
    config = tight("expected_attention", horizon=16)
    sources = []
    scores_of = Compressor._scores

    def watched(compressor, layers, questions):
        (layer,) = layers
        sources.append(tuple(x.clone() for x in questions[0].source(layer).tensors()))
        return scores_of(compressor, layers, questions)

    monkeypatch.setattr(Compressor, "_scores", watched)
    llm.generate(prompt, PARAMS, config)
    stats = llm.compressor(config).stats
    facts = llm.loaded.facts.layers[0]
    scores = []
    for layer, (keys, values) in enumerate(sources[: llm.loaded.facts.num_layers]):
        size = facts.head_dim
        turns = [rotate(torch.eye(size), torch.full((size,), 61 + t), facts.rope).double() for t in range(16)]
        turn = torch.stack(turns).mean(0).T
        mean = stats[layer].q_mean.double() @ turn.T
        spread = turn @ stats[layer].q_cov.double() @ turn.T
        every = keys.double().repeat_interleave(facts.group_size, 0)
        logits = facts.softmax.scale * torch.einsum("hd,htd->ht", mean, every)
        logits += facts.softmax.scale**2 / 2 * torch.einsum("htd,hde,hte->ht", every, spread, every)
        weights = logits.softmax(-1).unflatten(0, (facts.num_kv_heads, -1)).mean(1)
        scores.append(weights * values.double().norm(dim=-1))
    assert_best(passes[0], torch.stack(scores), sliding(llm))


@pytest.mark.parametrize("inner", ["h2o", "snapkv", "tova", "r_kv", "expected_attention", "query_mixture"])
def test_critical_ranks_the_second_half_again(inner, make_llm, passes):
    """7 of 14 places go to the best of the inner policy, which are what it would keep in 7 places."""
    llm = make_llm(enable_prefix_caching=False)
    prompt = tiny.prompts((61,), seed=2)
    firsts = []
    for config in (small(inner), small(inner, budget=17), small(f"critical({inner})")):
        del passes[:]
        (out,) = llm.generate(prompt, PARAMS, config)
        assert out.error is None
        firsts.append(passes[0])
    alone, half, critical = firsts
    assert {each.num_tokens for each in firsts} == {61}
    for kept, best in zip(critical.kept.flatten(0, 1), half.kept.flatten(0, 1), strict=True):
        assert torch.isin(best, kept).all()
    assert not torch.equal(critical.kept, alone.kept)


@pytest.mark.parametrize("policy", [name for name in policy_names() if name not in ("full", "oracle")])
def test_every_policy_is_served_without_sinks_and_recent_tokens(policy, make_llm):
    llm = make_llm(block_size=8)
    long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(tiny.prompts((70, 3)), long, small(policy, budget=16, sinks=0, recent=0))
    assert [out.outputs[0].finish_reason for out in outputs] == ["length", "length"]
    assert (outputs[0].metrics.compactions > 0) == make_policy(policy).eviction_method.evicts
