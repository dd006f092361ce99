"""Surrogate scores and one threshold over all heads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from compression_oracles import layer_facts, layer_view, model_facts, noise, query_stats
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.shares import Shares
from kvreclaim.compression.policies.surrogate import GRAIN
from kvreclaim.compression.policy import CountsQuestion, LayerSignals
from kvreclaim.compression.refusals import layer_stats
from kvreclaim.compression.registry import make_policy
from kvreclaim.compression.surrogate import (
    KNOTS,
    RIDGE,
    SOON,
    SurrogateFit,
    age_features,
    needed,
    num_features,
    weighed,
)
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.rope import RopeLayout, rotate
from kvreclaim.ops.scoring import surrogate_features

FREQUENCIES = torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
LAYOUTS = [RopeLayout(FREQUENCIES, style, start) for style in ("half", "interleaved") for start in (0, 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_features_know_no_position(layout):
    keys, values = noise(1, 2, 7, 8), noise(2, 2, 7, 5)
    found = [
        surrogate_features(rotate(keys.double(), torch.arange(7) + first, layout), values, layout)
        for first in (0, 900)
    ]
    assert found[0].shape == (2, 7, num_features(layer_facts(layout)) - 8 + 5)
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_features_one_by_one():
    layout, keys, values = LAYOUTS[1], noise(1, 1, 1, 8), noise(2, 1, 1, 8)
    k, v = keys[0, 0].double(), values[0, 0].double()
    bands = [(k[2 + f] ** 2 + k[5 + f] ** 2 + 1e-6).log() for f in range(3)]
    expected = torch.stack(
        [*bands, k[0], k[1], *v, k.norm(), (v.norm() + 1e-6).log(), torch.tensor(1.0).double()]
    )
    torch.testing.assert_close(
        surrogate_features(keys, values, layout)[0, 0].double(), expected, atol=1e-5, rtol=1e-5
    )


def test_a_score_that_is_linear_in_features_and_age_is_learnt():
    facts = model_facts(2, rope=LAYOUTS[0])
    fit, heads = SurrogateFit(facts), facts.layers[0].num_kv_heads
    truth = 0.05 * noise(9, 2, heads, fit.num_features)
    truth[..., -1] = -4
    aged = 0.3 * noise(10, 2, heads, len(KNOTS) - 1)
    ages = age_features(torch.arange(1100, 0, -1)).float()
    for document in range(3):
        for layer in range(2):
            keys, values = (noise(20 + 4 * document + layer + i, heads, 1100, 8) for i in (0, 50))
            rows = surrogate_features(keys, values, facts.layers[layer].rope)
            logits = (rows @ truth[layer, :, :, None])[..., 0] + (ages @ aged[layer, :, :, None])[..., 0]
            fit.add(layer, keys, values, logits.exp())
    found, found_age = fit.build()
    torch.testing.assert_close(found_age, aged, atol=0.05, rtol=0.05)
    keys, values = noise(77, heads, 40, 8), noise(78, heads, 40, 8)
    for layer in range(2):
        rows = surrogate_features(keys, values, facts.layers[layer].rope)
        ours, wanted = (rows @ w[layer, :, :, None] for w in (found, truth))
        torch.testing.assert_close(ours, wanted, atol=0.1, rtol=0.05)


def test_many_heads_of_a_large_dimension_are_fitted_by_several_threads():
    """LU factors of so many matrices, side by side, come out wrong in some versions of oneMKL."""
    layer = layer_facts(head_dim=128)
    facts = replace(model_facts(), layers=(layer,) * 28)
    fit, (keys, values) = SurrogateFit(facts), (noise(i, 2, 600, 128) for i in (1, 2))
    wanted = noise(3, 2, 600).exp()
    for number in range(28):
        fit.add(number, keys, values, wanted)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found, age = fit.build()
    finally:
        torch.set_num_threads(threads)
    rows = surrogate_features(keys, values, layer.rope).double()
    rows = torch.cat([rows, age_features(torch.arange(600, 0, -1)).double().expand(2, -1, -1)], -1)
    ridge = math.sqrt(RIDGE * 600) * torch.eye(rows.shape[-1]).double()
    for head in range(2):
        target = torch.cat([wanted[head].double().log(), torch.zeros(len(ridge)).double()])
        best = torch.linalg.lstsq(torch.cat([rows[head], ridge]), target[:, None]).solution[:, 0]
        for number in range(28):
            ours = torch.cat([found[number, head], age[number, head]])
            torch.testing.assert_close(ours.double(), best, atol=1e-4, rtol=1e-4)


def test_age_is_linear_in_its_logarithm_between_knots():
    ages = torch.tensor([1, 64, 91, 128, 181, 512, 724, 1024, 9000])
    halves = torch.tensor([0, 0, 0.508, 1, 1.5, 3, 3.5, 4, 4]).double()
    expected = torch.stack([(1 - (halves - knot).abs()).clamp_min(0) for knot in range(4)], dim=-1)
    torch.testing.assert_close(age_features(ages), expected, atol=2e-3, rtol=0)


def test_what_is_needed_soon_outweighs_what_may_be_needed_later():
    reached = torch.tensor([[[0.9, 0.9, 0.9]], [[0.1, 0.0, 0.5]], [[0.2, 0.3, 0.5]]])
    torch.testing.assert_close(needed(reached, 2), torch.tensor([[0.1 * math.exp(SOON), 0.3]]))


def test_attention_counts_by_what_the_value_adds():
    """The value adds to the residual stream, through the query head that makes most of it."""
    reached, values, weights = noise(1, 3, 2, 5).abs(), noise(2, 2, 5, 4), noise(3, 2, 3, 4, 7)
    found = weighed(reached, values, weights @ weights.mT)
    for head in range(2):
        for token in range(5):
            added = max((values[head, token] @ weights[head, query]).norm() for query in range(3))
            torch.testing.assert_close(found[:, head, token], reached[:, head, token] * added)


def test_a_fit_without_a_layer_is_refused():
    fit = SurrogateFit(model_facts(2, rope=LAYOUTS[0]))
    fit.add(0, noise(1, 2, 9, 8), noise(2, 2, 9, 8), noise(3, 2, 9).abs().clamp_max(1))
    with pytest.raises(InvalidArgumentError, match="layer 1 has no token"):
        fit.build()


def test_the_policy_is_the_product_and_the_age():
    facts = model_facts(1, rope=LAYOUTS[0])
    stats = query_stats(facts).layer(0)
    view = layer_view(facts.layers[0], stats)
    heads, tokens = view.keys.shape[:2]
    positions = torch.stack([torch.arange(tokens) * (7 + head) for head in range(heads)]).int()
    view = replace(view, signals=LayerSignals(positions=positions), logical_len=9 * tokens)
    rows = surrogate_features(view.keys, view.values, LAYOUTS[0])
    ages = age_features(9 * tokens - positions)
    expected = torch.einsum("ktp,kp->kt", rows.double(), stats.surrogate.double())
    expected += torch.einsum("kta,ka->kt", ages, stats.surrogate_age.double())
    scores = make_policy("surrogate").score(view).double()
    torch.testing.assert_close(scores, expected, atol=GRAIN / 2 + 1e-4, rtol=0)
    assert bool((scores / GRAIN == (scores / GRAIN).round()).all())


def test_statistics_without_one_are_refused():
    facts = model_facts(1, rope=LAYOUTS[0])
    bare = query_stats(facts, surrogate=False)
    with pytest.raises(InvalidArgumentError, match=r"surrogate needs statistics with a surrogate.*calibrate"):
        layer_stats(make_policy("surrogate"), bare, facts)


def naive(scores, free):
    """The best of all one by one."""
    heads = [head.tolist() for layer in scores for head in layer]
    ranked = sorted((-score, h, j) for h, head in enumerate(heads) for j, score in enumerate(head))
    owners = [h for _, h, _ in ranked[: free * len(heads)]]
    return [owners.count(h) for h in range(len(heads))]


@given(
    lengths=st.lists(st.lists(st.integers(6, 12), min_size=2, max_size=2), min_size=1, max_size=3),
    free=st.integers(1, 6),
    floor=st.sampled_from([0.0, 0.01, 0.1, 0.2]),
    grain=st.sampled_from([1e-6, 0.5, 3.0]),
)
def test_the_threshold_is_one_for_all_layers_and_heads(lengths, free, floor, grain):
    """Also where many scores are equal, or all of them."""
    scores = [
        [(noise(10 * n + h, length) / grain).round() for h, length in enumerate(row)]
        for n, row in enumerate(lengths)
    ]
    found = Shares(Knorm(), floor).counts(CountsQuestion(scores, 3, 3 + free, 16))
    equal = min(16 * floor, free / 5)
    wanted = [equal + (1 - equal / free) * count for count in naive(scores, free)]
    held = [length for row in lengths for length in row]
    assert found.mean().item() == pytest.approx(float(min(free, torch.tensor(held).double().mean())) + 3)
    pairs = zip((found - 3).flatten().tolist(), wanted, held, strict=True)
    if all(count <= length for count, length in zip(wanted, held, strict=True)):
        assert [count for count, _, _ in pairs] == pytest.approx(wanted)
    else:
        assert all(min(want, length) - 1e-6 <= count <= length for count, want, length in pairs)


def test_a_layer_may_take_all():
    scores = [[torch.arange(8.0) + 100, torch.arange(8.0) + 100], [torch.arange(8.0), torch.arange(8.0)]]
    assert Shares(Knorm()).counts(CountsQuestion(scores, 0, 4, 0)).tolist() == [[8, 8], [0, 0]]
    found = Shares(Knorm(), 0.2).counts(CountsQuestion(scores, 0, 4, 8)).flatten().tolist()
    assert found == pytest.approx([7.2, 7.2, 0.8, 0.8])


@pytest.mark.parametrize("spec", ["segments(ada_kv)", "ada_kv", "full", "quest"])
def test_what_cannot_be_compared_is_refused(spec):
    with pytest.raises(InvalidArgumentError, match=r"shares\(.*\) is refused"):
        make_policy(f"shares({spec})")
