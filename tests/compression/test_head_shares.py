"""Shares of heads: how they are measured, and what lies between the fractions they were measured at."""

from __future__ import annotations

import pytest
import torch
from compression_oracles import model_facts, noise, query_stats

from kvreclaim.compression.head_shares import FRACTIONS, SharesFit, share_at
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
    for document in documents:
        for layer in (1, 0):
            fit.add(layer, document[layer])
    found = fit.build()
    assert found.shape == (2, 2, len(FRACTIONS))
    for i, fraction in enumerate(FRACTIONS):
        expected = torch.stack([naive_shares(document, fraction) for document in documents]).mean(dim=0)
        torch.testing.assert_close(found[..., i].double(), expected, atol=1e-6, rtol=0)


def test_shares_of_half_a_document_or_of_none_are_refused():
    fit = SharesFit(model_facts(2))
    with pytest.raises(InvalidArgumentError, match="every layer"):
        fit.build()
    fit.add(0, noise(1, 2, 9))
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
            stats.metadata.model_copy(update={"fractions": fractions, "num_centers": 0, "covariance": False}),
            stats.q_mean,
            stats.q_abs_mean,
            surrogate=stats.surrogate,
            head_shares=stats.head_shares,
        )
