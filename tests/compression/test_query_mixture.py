"""The mixture score against loops, and against what it means."""

import dataclasses
from functools import partial

import pytest
import torch
from compression_oracles import layer_facts, layer_view, layout, mixture_scores, noise, with_kv

from kvreclaim.compression.policies.query_mixture import QueryMixture
from kvreclaim.compression.stats import LayerStats
from kvreclaim.ops import scoring
from kvreclaim.ops.facts import Softmax
from kvreclaim.ops.rope import rotate

FORMS = ("expected", "collapsed", "sum")
plain = partial(QueryMixture, temperature=1.0, value_norm=False)


def mixture(num_centers=3, head_dim=8, spread=1.0, owners=4):
    """Make statistics of 4 query heads; owners 2: centres that the two query heads of each KV head share."""
    centers = noise(20, owners, num_centers, head_dim)
    variances = spread * noise(21, owners, num_centers, head_dim).square()
    weights = noise(24, owners, num_centers).abs().softmax(-1)
    return LayerStats(noise(22, 4, head_dim), noise(23, 4, head_dim // 2).abs(), centers, variances, weights)


@pytest.mark.parametrize("owners", [4, 2], ids=["own", "shared"])
@pytest.mark.parametrize("normalise", ["candidates", "all"])
@pytest.mark.parametrize(
    "rope",
    [layout(4), layout(4, "interleaved"), layout(2, "half", 2), layout(0)],
    ids=["half", "gptj", "part", "none"],
)
def test_equals_the_loop(rope, normalise, owners):
    view = layer_view(layer_facts(rope), mixture(owners=owners))
    policy = plain(offsets=(1, 16, 4096), normalise=normalise)
    over = range(9) if normalise == "all" else range(9)[view.candidates]
    expected = mixture_scores(view, (1, 16, 4096), over)
    torch.testing.assert_close(policy.score(view).double(), expected, rtol=1e-4, atol=1e-6)


def test_centres_in_several_batches_give_the_same(monkeypatch):
    view = layer_view(layer_facts(), mixture(5))
    whole = plain().score(view)
    monkeypatch.setattr(scoring, "MAX_LOGITS", 2 * 4 * 5 * 9)
    torch.testing.assert_close(plain().score(view), whole)


def test_value_norm_multiplies():
    view = layer_view(layer_facts(), mixture())
    expected = plain().score(view) * view.values.norm(dim=-1)
    torch.testing.assert_close(plain(value_norm=True).score(view), expected)


def test_shared_centres_are_every_query_heads_own():
    """The scores are as if each query head of the group had all of them."""
    shared = mixture(owners=2)
    own = LayerStats(
        shared.q_mean,
        shared.q_abs_mean,
        *(t.repeat_interleave(2, 0) for t in (shared.centers, shared.center_var, shared.center_weight)),
    )
    for form in FORMS:
        policy = plain(form=form)
        ours, theirs = (policy.score(layer_view(layer_facts(), stats)) for stats in (shared, own))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
def test_temperature_divides_the_softmax_scale(form):
    view = layer_view(layer_facts(), mixture())
    facts = dataclasses.replace(view.facts, softmax=Softmax(view.facts.softmax.scale / 4))
    cooler = dataclasses.replace(view, facts=facts)
    expected = plain(form=form, temperature=1.0).score(cooler)
    torch.testing.assert_close(plain(form=form, temperature=4.0).score(view), expected)


def plain_logits(view, offsets):
    """[H, C, O, T] float64 by way of rotated centres."""
    stats, facts = view.stats, view.facts
    keys = view.keys.double().repeat_interleave(2, dim=0)
    turned = torch.stack(
        [rotate(stats.centers.double(), torch.tensor([view.logical_len + d]), facts.rope) for d in offsets], 2
    )
    spread = stats.center_var.double() @ keys.square().mT
    scale = facts.softmax.scale
    return scale * turned.double() @ keys[:, None].mT + scale**2 / 2 * spread[:, :, None]


@pytest.mark.parametrize("normalise", ["candidates", "all"])
def test_the_sum_over_centres(normalise):
    view, offsets = layer_view(layer_facts(), mixture()), (1, 16, 4096)
    over = slice(None) if normalise == "all" else view.candidates
    attention = plain_logits(view, offsets)[..., over].softmax(-1).mean(2)
    expected = torch.zeros(2, 9, dtype=torch.float64)
    summed = (view.stats.center_weight.double()[..., None] * attention).sum(1)
    expected[:, over] = summed.view(2, 2, -1).amax(1)
    found = plain(offsets, form="sum", normalise=normalise).score(view)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalise", ["candidates", "all"])
def test_the_collapsed_form(normalise):
    view, offsets = layer_view(layer_facts(), mixture()), (1, 16, 4096)
    over = slice(None) if normalise == "all" else view.candidates
    logits = plain_logits(view, offsets).mean(2)[..., over]
    standard = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, correction=0, keepdim=True)
    best = standard.amax(1).view(2, 2, -1).amax(1)
    expected = torch.zeros(2, 9, dtype=torch.float64)
    expected[:, over] = best - best.amin(-1, keepdim=True)
    found = plain(offsets, form="collapsed", normalise=normalise).score(view)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_finite_and_leaves_the_protected_at_zero(form):
    view = layer_view(layer_facts(), mixture())
    loud = with_kv(view, keys=view.keys * 1e4)
    assert plain(form=form).score(loud).isfinite().all()
    scores = plain(form=form, normalise="candidates").score(view)
    assert (scores[:, :1] == 0).all()
    assert (scores[:, -2:] == 0).all()
    none = dataclasses.replace(view, candidates=slice(4, 4))
    assert torch.equal(plain(form=form, normalise="candidates").score(none), torch.zeros(2, 9))
