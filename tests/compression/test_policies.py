"""One contract for every registered policy, and the arithmetic of the small ones."""

import dataclasses

import pytest
import torch
from compression_oracles import layer_facts, layer_view, layout, model_facts, noise, query_stats, with_kv

from kvreclaim.compression import CompressionConfig, Compressor, Mode, Signal, make_policy, policy_names
from kvreclaim.compression.policies.evict_only import EvictOnly
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.streaming_llm import StreamingLLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.key_source import DenseSource

POLICIES = policy_names()
ROPES = {"full": layout(4), "interleaved": layout(4, "interleaved"), "partial": layout(3)}
every_policy = pytest.mark.parametrize("name", POLICIES)


def a_view(rope=None, **shape):
    facts = model_facts(rope=rope)
    return layer_view(facts.layers[0], query_stats(facts).layer(0), **shape)


@every_policy
class TestContract:
    def test_declares_itself(self, name):
        policy = make_policy(name)
        assert policy.name == name
        assert isinstance(policy.default_mode, Mode)
        assert all(isinstance(signal, Signal) for signal in policy.needs)
        assert dataclasses.is_dataclass(policy)
        assert policy == make_policy(name)
        assert hash(policy) == hash(make_policy(name))
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy.anything = 1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
    def test_scores_are_finite_fp32_per_kv_head_and_token(self, name, rope, dtype):
        view = a_view(rope)
        view = with_kv(view, view.keys.to(dtype), view.values.to(dtype))
        scores = make_policy(name).score(view)
        assert scores.shape == (2, 9)
        assert scores.dtype == torch.float32
        assert scores.isfinite().all()

    @pytest.mark.parametrize("num_tokens", [1, 3])
    def test_short_sequences_and_no_candidates(self, name, num_tokens):
        view = dataclasses.replace(a_view(num_tokens=num_tokens), candidates=slice(1, 1))
        assert make_policy(name).score(view).isfinite().all()

    def test_zero_keys_are_finite(self, name):
        view = a_view()
        view = with_kv(view, keys=torch.zeros_like(view.keys))
        assert make_policy(name).score(view).isfinite().all()

    def test_is_pure_and_deterministic(self, name):
        view, untouched = a_view(), a_view()
        policy = make_policy(name)
        before = torch.get_rng_state()
        first, second = policy.score(view), policy.score(view)
        assert torch.equal(first, second)
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(view.keys, untouched.keys)
        assert torch.equal(view.values, untouched.values)
        for field in dataclasses.fields(view.stats):
            assert torch.equal(getattr(view.stats, field.name), getattr(untouched.stats, field.name))

    def test_a_kv_head_does_not_see_the_others(self, name):
        view = a_view()
        facts = dataclasses.replace(view.facts, num_heads=2, num_kv_heads=1)
        fields = [field.name for field in dataclasses.fields(view.stats)]
        stats = dataclasses.replace(view.stats, **{f: getattr(view.stats, f)[2:] for f in fields})
        alone = with_kv(view, view.keys[1:], view.values[1:])
        alone = dataclasses.replace(alone, facts=facts, stats=stats)
        policy = make_policy(name)
        torch.testing.assert_close(policy.score(alone)[0], policy.score(view)[1])

    def test_strided_keys_score_like_packed_ones(self, name):
        view = a_view()
        loose = with_kv(view, keys=view.keys.transpose(0, 1).contiguous().transpose(0, 1))
        policy = make_policy(name)
        torch.testing.assert_close(policy.score(loose), policy.score(view))

    @pytest.mark.parametrize("mode", [None, *Mode])
    def test_a_budget_that_holds_everything_is_the_identity(self, name, mode):
        facts = model_facts()
        config = CompressionConfig(name, budget=9, sinks=1, recent=2, mode=mode)
        compressor = Compressor(config, facts, query_stats(facts))
        kept = compressor.choose(lambda _: DenseSource(noise(0, 2, 9, 8), noise(1, 2, 9, 8)), 9, 4, 9)
        assert torch.equal(kept, torch.arange(9).expand_as(kept))

    def test_keeps_exactly_the_budget_with_sinks_and_recent_tokens(self, name):
        facts = model_facts()
        config = CompressionConfig(name, budget=6, sinks=1, recent=2)
        compressor = Compressor(config, facts, query_stats(facts))
        kept = compressor.choose(lambda n: DenseSource(noise(n, 2, 9, 8), noise(n + 9, 2, 9, 8)), 9, 4, 30)
        assert kept.shape[-1] == (6 if compressor.evicts else 9)
        assert (kept.diff(dim=-1) > 0).all()
        assert {0, 7, 8} <= set.intersection(*(set(row.tolist()) for row in kept.flatten(0, 1)))


def test_streaming_llm_keeps_the_checked_window():
    config = CompressionConfig("streaming_llm", budget=6, sinks=2, recent=0)
    compressor = Compressor(config, model_facts())
    kept = compressor.choose(lambda _: DenseSource(noise(0, 2, 12, 8), noise(1, 2, 12, 8)), 12, 12, 12)
    assert kept.tolist() == [[[0, 1, 8, 9, 10, 11]]]


@pytest.mark.parametrize(("keep", "sign"), [("small", -1), ("large", 1)])
def test_knorm_is_the_signed_norm(keep, sign):
    view = a_view()
    torch.testing.assert_close(Knorm(keep).score(view), sign * view.keys.norm(dim=-1), rtol=2**-14, atol=0)


def test_knorm_is_published_with_small_norms_kept():
    assert Knorm().keep == "small"


def test_recency_is_exact_for_a_million_tokens():
    facts = dataclasses.replace(layer_facts(head_dim=2), num_heads=1, num_kv_heads=1)
    view = layer_view(facts, None, num_tokens=1_000_001)
    assert StreamingLLM().score(view)[0, -1] == 1_000_000


class TestEvictOnly:
    def test_delegates_and_moves_nothing(self):
        wrapped, inner = make_policy("evict-only(triattention)"), make_policy("triattention")
        view = a_view()
        assert (wrapped.evicts, wrapped.compacts) == (True, False)
        assert (wrapped.needs, wrapped.default_mode) == (inner.needs, inner.default_mode)
        assert torch.equal(wrapped.score(view), inner.score(view))

    @pytest.mark.parametrize("inner", ["full", "evict-only", "evict-only(knorm)"])
    def test_refuses_what_it_contradicts(self, inner):
        with pytest.raises(InvalidArgumentError, match="contradiction"):
            make_policy(f"evict-only({inner})")

    def test_bare_wraps_the_default(self):
        assert make_policy("evict-only") == EvictOnly(make_policy("query_mixture"))
