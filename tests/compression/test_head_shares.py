"""Shares of heads: how they are measured, and what lies between the fractions they were measured at."""

from __future__ import annotations

import pytest
import torch
from compression_oracles import model_facts, noise, query_stats
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.head_shares import FRACTIONS, SharesFit, share_at
from kvreclaim.compression.policy import CountsQuestion
from kvreclaim.compression.registry import make_policy
from kvreclaim.compression.stats import LayerStats
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError


def naive_shares(document, fraction):
    """document [L, K, T]: part of each head's tokens among the best of all."""
    layers, heads, tokens = document.shape
    every = [
        (-float(document[n, h, t]), n, h) for n in range(layers) for h in range(heads) for t in range(tokens)
    ]
    found = torch.zeros(layers, heads, dtype=torch.float64)
    for _, layer, head in sorted(every)[: round(fraction * len(every))]:
        found[layer, head] += 1 / tokens
    return found


def test_a_share_is_the_mean_part_of_a_heads_tokens_above_the_threshold():
    fit, documents = (
        SharesFit(model_facts(2)),
        [noise(n, 2, 2, tokens) for n, tokens in enumerate((60, 41, 97))],
    )
    for layer in (1, 0):  # as one pass over all documents shows them
        for number, document in enumerate(documents):
            fit.add(layer, number, document[layer])
    found = fit.build()
    assert found.shape == (2, 2, len(FRACTIONS))
    for i, fraction in enumerate(FRACTIONS):
        expected = torch.stack([naive_shares(document, fraction) for document in documents]).mean(dim=0)
        torch.testing.assert_close(found[..., i].double(), expected, atol=1e-6, rtol=0)


def test_shares_of_half_a_document_or_of_none_are_refused():
    fit = SharesFit(model_facts(2))
    with pytest.raises(InvalidArgumentError, match="every layer"):
        fit.build()
    fit.add(0, 0, noise(1, 2, 9))
    with pytest.raises(InvalidArgumentError, match="every layer"):
        fit.build()


def test_between_fractions_the_logarithm_counts():
    shares = torch.tensor([[0.8, 0.5, 0.3], [0.0, 0.1, 0.2]])
    fractions = (0.4, 0.2, 0.1)
    for fraction, column in zip(fractions, shares.T, strict=True):
        torch.testing.assert_close(share_at(shares, fractions, fraction), column.double())
    middle = share_at(shares, fractions, (0.4 * 0.2) ** 0.5)
    torch.testing.assert_close(middle, torch.tensor([0.65, 0.05], dtype=torch.float64))
    torch.testing.assert_close(share_at(shares, fractions, 0.4**0.5), torch.tensor([0.9, 0.5]).double())
    torch.testing.assert_close(share_at(shares, fractions, 0.05), torch.tensor([0.15, 0.1]).double())
    assert share_at(shares, fractions, 1.0).tolist() == share_at(shares, fractions, 1.5).tolist() == [1, 1]


@pytest.mark.parametrize("fractions", [(0.1, 0.2, 0.3, 0.4), (0.4, 0.4, 0.2, 0.1)])
def test_fractions_must_fall(fractions):
    stats = query_stats(model_facts(2))
    with pytest.raises(StatsMismatchError, match="must fall"):
        type(stats)(
            metadata=stats.metadata.model_copy(
                update={"fractions": fractions, "num_centers": 0, "covariance": False}
            ),
            q_mean=stats.q_mean,
            q_abs_mean=stats.q_abs_mean,
            surrogate=stats.surrogate,
            surrogate_age=stats.surrogate_age,
            head_shares=stats.head_shares,
        )


def layers_of(shares):
    """Statistics of layers whose shares [L, K, S] were measured at .5 and .25."""
    nothing = torch.zeros(1, 1)
    return [
        LayerStats(nothing, nothing, head_shares=torch.tensor(row), fractions=(0.5, 0.25)) for row in shares
    ]


def static_counts(shares, lengths, protected, budget, logical_len, floor=0.0):
    scores = [[noise(h, length) for h, length in enumerate(row)] for row in lengths]
    policy = make_policy(f"shares(random, floor={floor}, by=static)")
    return policy.counts(CountsQuestion(scores, protected, budget, logical_len, layers_of(shares)))


SHARES = [[[0.9, 0.6], [0.1, 0.05]], [[0.6, 0.2], [0.4, 0.15]]]


def test_static_shares_are_of_the_text_so_far():
    """At half of 100 tokens: .9, .1, .6, .4 of them, which is the budget already."""
    assert static_counts(SHARES, [[94, 94], [94, 94]], 6, 50, 100).flatten().tolist() == pytest.approx(
        [90, 10, 60, 40]
    )
    found = static_counts(SHARES, [[94, 94], [94, 94]], 6, 25, 100)
    assert found.flatten().tolist() == pytest.approx([60, 6, 20 * 34 / 35, 15 * 34 / 35], abs=3)
    assert found.mean().item() == pytest.approx(25)


def test_what_a_head_no_longer_holds_goes_to_the_others_in_proportion():
    found = static_counts(SHARES, [[44, 94], [94, 94]], 6, 50, 100)
    assert found.flatten().tolist() == pytest.approx([50, *(n * 150 / 110 for n in (10, 60, 40))])


def test_a_head_that_needs_nothing_has_what_is_protected_and_what_no_other_can_use():
    shares = [[[1.0, 1.0], [0.0, 0.0]]]
    assert static_counts(shares, [[90, 90]], 10, 50, 100).flatten().tolist() == pytest.approx(
        [90, 10], abs=1e-3
    )
    assert static_counts(shares, [[50, 90]], 10, 50, 100).flatten().tolist() == pytest.approx([60, 40])
    assert static_counts(shares, [[90, 90]], 10, 50, 100, floor=0.2).flatten().tolist() == pytest.approx(
        [82, 18], abs=1e-3
    )
    assert static_counts(shares, [[90, 90]], 10, 50, 100, floor=0.02).flatten().tolist() == pytest.approx(
        [88, 12], abs=1e-3
    )


@given(
    shares=st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=2, max_size=2),
    lengths=st.lists(st.lists(st.integers(0, 60), min_size=2, max_size=2), min_size=2, max_size=2),
    protected=st.integers(0, 5),
    part=st.floats(0, 1),
    floor=st.sampled_from([0.0, 0.01, 0.2]),
    evicted=st.integers(0, 500),
)
def test_static_counts_have_the_budget_as_their_mean(shares, lengths, protected, part, floor, evicted):
    limit = torch.tensor(lengths, dtype=torch.float64)
    budget = max(1, protected + int(part * float(limit.mean())))
    if budget - protected > limit.mean():
        return
    both = [[[share, share / 2] for share in row] for row in shares]
    found = static_counts(both, lengths, protected, budget, 65 + evicted, floor)
    assert found.mean().item() == pytest.approx(budget, abs=1e-6)
    assert ((found >= protected - 1e-9) & (found <= protected + limit + 1e-9)).all()
    safe = limit.clamp(max=int(min(floor * (65 + evicted), (budget - protected) / 5)))
    assert (found >= protected + safe - 1e-6).all()


def test_static_shares_go_with_any_ranking_and_need_statistics():
    facts, stats = model_facts(2), query_stats(model_facts(2))
    for inner in ("streaming_llm", "random", "knorm(keep=large)", "critical(snapkv)"):
        policy = f"shares({inner}, by=static)"
        assert Compressor(CompressionConfig(policy, stats=stats), facts).policy == make_policy(policy)
    with pytest.raises(
        InvalidArgumentError, match="needs query statistics and none were given; run `kvreclaim"
    ):
        Compressor(CompressionConfig("shares(knorm, by=static)"), facts)
    bare = query_stats(facts, surrogate=False)
    with pytest.raises(
        InvalidArgumentError, match=r"statistics with shares of heads.*hold none; run `kvreclaim"
    ):
        Compressor(CompressionConfig("shares(knorm, by=static)", stats=bare), facts)
    for inner in ("full", "ada_kv", "streaming_llm(positions=cache)"):
        with pytest.raises(InvalidArgumentError, match=r"shares\(.*\) is refused"):
            make_policy(f"shares({inner}, by=static)")
