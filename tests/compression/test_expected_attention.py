"""Expected Attention against its definition, position by position."""

import dataclasses

import pytest
import torch
from compression_oracles import layer_facts, layer_view, layout, noise

from kvreclaim.compression.policies.expected_attention import ExpectedAttention
from kvreclaim.compression.policies.query_mixture import QueryMixture
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.stats import LayerStats
from kvreclaim.ops.rope import rotate

ROPES = {
    "half": layout(4),
    "interleaved": layout(4, "interleaved"),
    "partial": layout(2, "half", 2),
    "none": layout(0),
}


def gaussian():
    root = noise(31, 4, 8, 8)
    return LayerStats(noise(30, 4, 8), noise(32, 4, 4).abs(), q_cov=root @ root.mT / 8)


def mean_rotation(rope, logical_len, horizon):
    """[D, D] float64: the rotation matrix of each position, averaged."""
    basis = torch.eye(8)
    turned = [rotate(basis, torch.full((8,), logical_len + t), rope).double() for t in range(horizon)]
    return torch.stack(turned).mean(dim=0).T


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("horizon", [1, 512])
@pytest.mark.parametrize(
    "options", [{}, {"covariance": False}, {"value_norm": False}, {"group": "max"}], ids=str
)
def test_equals_the_definition(options, horizon, rope):
    stats = gaussian()
    view = layer_view(layer_facts(rope), stats)
    turn, scale = mean_rotation(rope, view.logical_len, horizon), view.facts.softmax.scale
    rows = []
    for h in range(4):
        keys = view.keys[h // 2].double()
        logits = scale * keys @ (turn @ stats.q_mean[h].double())
        if options.get("covariance", True):
            spread = turn @ stats.q_cov[h].double() @ turn.T
            logits = logits + scale**2 / 2 * torch.stack([key @ spread @ key for key in keys])
        rows.append(logits.softmax(dim=0))
    grouped = torch.stack(rows).view(2, 2, -1)
    expected = grouped.amax(1) if options.get("group") == "max" else grouped.mean(1)
    if options.get("value_norm", True):
        expected = expected * view.values.double().norm(dim=-1)
    got = ExpectedAttention(horizon=horizon, **options).score(view)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)


def test_one_position_and_round_clusters_are_a_mixture_of_one():
    """Where the two published scores must agree: one centre, and a variance that rotation leaves alone."""
    variance = noise(33, 4, 4).square().repeat(1, 2)
    mean = noise(30, 4, 8)
    stats = LayerStats(
        mean,
        mean[:, :4].abs(),
        mean[:, None],
        variance[:, None],
        torch.ones(4, 1),
        torch.diag_embed(variance),
    )
    view = layer_view(layer_facts(), stats)
    expected = QueryMixture(offsets=(0,), temperature=1.0, value_norm=False).score(view)
    got = ExpectedAttention(horizon=1, value_norm=False, group="max").score(view)
    torch.testing.assert_close(got, expected)


def test_the_exponent_is_the_mean_over_gaussian_queries():
    """log E[exp(s q.k)] over a million draws of q."""
    view = layer_view(layer_facts(layout(0)), gaussian())
    mean, covariance = view.stats.q_mean[0].double(), view.stats.q_cov[0].double()
    draws = mean + noise(34, 1_000_000, 8, dtype=torch.float64) @ torch.linalg.cholesky(covariance).T
    sampled = (view.facts.softmax.scale * draws @ view.keys[0].double().T).exp().mean(dim=0)
    one = dataclasses.replace(view, facts=dataclasses.replace(view.facts, num_heads=2))
    one = dataclasses.replace(
        one,
        stats=LayerStats(
            *(t[::2] for t in (view.stats.q_mean, view.stats.q_abs_mean)), q_cov=view.stats.q_cov[::2]
        ),
    )
    got = ExpectedAttention(value_norm=False).score(one)[0]
    torch.testing.assert_close(got.double(), sampled / sampled.sum(), rtol=2e-2, atol=0)


def test_needs_covariances_only_for_the_quadratic_term():
    assert ExpectedAttention().needs == {Signal.QUERY_STATS, Signal.QUERY_COVARIANCE}
    assert ExpectedAttention(covariance=False).needs == {Signal.QUERY_STATS}
