"""The mixture score against loops, and against what it means."""

import dataclasses

import pytest
import torch
from compression_oracles import layer_facts, layer_view, layout, mixture_scores, noise, with_kv

from kvreclaim.compression import LayerStats
from kvreclaim.compression.policies.query_mixture import QueryMixture
from kvreclaim.ops import scoring
from kvreclaim.ops.rope import rotate


def mixture(num_centers=3, head_dim=8, spread=1.0):
    centers = noise(20, 4, num_centers, head_dim)
    variances = spread * noise(21, 4, num_centers, head_dim).square()
    weights = torch.full((4, num_centers), 1 / num_centers)
    return LayerStats(noise(22, 4, head_dim), noise(23, 4, head_dim // 2).abs(), centers, variances, weights)


@pytest.mark.parametrize("normalise", ["candidates", "all"])
@pytest.mark.parametrize(
    "rope",
    [layout(4), layout(4, "interleaved"), layout(2, "half", 2), layout(0)],
    ids=["half", "gptj", "part", "none"],
)
def test_equals_the_loop(rope, normalise):
    view = layer_view(layer_facts(rope), mixture())
    policy = QueryMixture(offsets=(1, 16, 4096), normalise=normalise)
    over = range(9) if normalise == "all" else range(9)[view.candidates]
    expected = mixture_scores(view, (1, 16, 4096), over)
    torch.testing.assert_close(policy.score(view).double(), expected, rtol=1e-4, atol=1e-6)


def test_one_exact_centre_is_the_attention_of_that_query():
    rope = layout(4)
    stats = mixture(1, spread=0.0)
    view = layer_view(layer_facts(rope), stats)
    queries = rotate(stats.centers, torch.tensor([view.logical_len + 5]), rope)[:, 0]
    keys = view.keys.repeat_interleave(2, dim=0)
    attention = ((keys @ queries[..., None])[..., 0] * view.facts.scale).softmax(dim=-1)
    expected = attention.view(2, 2, -1).amax(dim=1)
    torch.testing.assert_close(QueryMixture(offsets=(5,)).score(view), expected)


def test_a_repeated_centre_changes_nothing():
    view = layer_view(layer_facts(), mixture())
    stats = view.stats
    twice = LayerStats(
        stats.q_mean,
        stats.q_abs_mean,
        torch.cat([stats.centers, stats.centers[:, :1]], dim=1),
        torch.cat([stats.center_var, stats.center_var[:, :1]], dim=1),
        torch.cat([stats.center_weight, torch.zeros(4, 1)], dim=1),
    )
    other = dataclasses.replace(view, stats=twice)
    torch.testing.assert_close(QueryMixture().score(other), QueryMixture().score(view))


def test_centres_in_several_batches_give_the_same(monkeypatch):
    view = layer_view(layer_facts(), mixture(5))
    whole = QueryMixture().score(view)
    monkeypatch.setattr(scoring, "MAX_LOGITS", 2 * 4 * 5 * 9)
    torch.testing.assert_close(QueryMixture().score(view), whole)


def test_value_norm_multiplies():
    view = layer_view(layer_facts(), mixture())
    expected = QueryMixture().score(view) * view.values.norm(dim=-1)
    torch.testing.assert_close(QueryMixture(value_norm=True).score(view), expected)


def test_large_logits_stay_finite():
    view = layer_view(layer_facts(), mixture())
    loud = with_kv(view, keys=view.keys * 1e4)
    score = QueryMixture().score(loud)
    assert score.isfinite().all()
    assert score.amax() <= 1.0


def test_no_candidates_score_nothing():
    view = dataclasses.replace(layer_view(layer_facts(), mixture()), candidates=slice(4, 4))
    assert torch.equal(QueryMixture(normalise="candidates").score(view), torch.zeros(2, 9))
