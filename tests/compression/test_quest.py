"""Quest's bound against a loop, and that it is a bound."""

import pytest
import torch
from compression_oracles import noise

from kvreclaim.compression.policies.quest import Quest
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

HEADS, KV_HEADS, BLOCKS, SLOTS, DIM = 6, 2, 5, 4, 8
KEYS = noise(1, 3, KV_HEADS, BLOCKS, SLOTS, DIM)
LOW, HIGH = KEYS.amin(dim=-2), KEYS.amax(dim=-2)
QUERIES = noise(2, 3, HEADS, DIM)


def test_is_the_sum_over_channels_of_the_greater_product():
    scores = Quest().block_scores(QUERIES, LOW, HIGH)
    assert scores.shape == (3, KV_HEADS, BLOCKS)
    for n, k, block in torch.cartesian_prod(torch.arange(3), torch.arange(KV_HEADS), torch.arange(BLOCKS)):
        channels = list(zip(LOW[n, k, block].tolist(), HIGH[n, k, block].tolist(), strict=True))
        bounds = [
            sum(max(q * low, q * high) for q, (low, high) in zip(query.tolist(), channels, strict=True))
            for query in QUERIES[n, 3 * k : 3 * k + 3]
        ]
        assert scores[n, k, block].item() == pytest.approx(max(bounds), rel=1e-5, abs=1e-5)


def test_no_key_of_a_block_exceeds_it():
    products = torch.einsum("nkgd,nkbsd->nkgbs", QUERIES.unflatten(1, (KV_HEADS, -1)), KEYS)
    assert (products.amax(dim=(2, 4)) <= Quest().block_scores(QUERIES, LOW, HIGH) + 1e-5).all()


def test_a_block_of_one_key_is_scored_by_its_product():
    scores = Quest().block_scores(QUERIES, KEYS[..., 0, :], KEYS[..., 0, :])
    products = torch.einsum("nkgd,nkbd->nkgb", QUERIES.unflatten(1, (KV_HEADS, -1)), KEYS[..., 0, :])
    torch.testing.assert_close(scores, products.amax(dim=2))


def test_half_precision_is_scored_in_single():
    halves = [x.to(torch.bfloat16) for x in (QUERIES, LOW, HIGH)]
    scores = Quest().block_scores(*halves)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, Quest().block_scores(*[x.float() for x in halves]))


def test_evicts_nothing():
    assert Quest().eviction_method is EvictionMethod.READS
