"""Scores of policies that read keys and values alone, against loops and published examples."""

import dataclasses
import math
from itertools import chain
from statistics import stdev

import pytest
import torch
from compression_oracles import layer_facts, layer_view, model_facts, noise, with_kv

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.keydiff import KeyDiff
from kvreclaim.compression.policies.lagkv import LagKV
from kvreclaim.compression.policies.paged_eviction import PagedEviction
from kvreclaim.compression.policies.quest import Quest
from kvreclaim.compression.policies.random import Random
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


def test_keeps_the_two_keys_that_differ():
    keys = torch.tensor([[[2.0, 0.0], [2.0, 0.2], [0.0, 3.0], [1.8, 0.1]]])
    facts = dataclasses.replace(model_facts(1), layers=(dataclasses.replace(layer_facts(), num_kv_heads=1),))
    compressor = Compressor(CompressionConfig("keydiff", budget=2, sinks=0, recent=0), facts)
    kept = compressor.choose(lambda _: DenseSource(keys, keys), 4, 0, 4)
    assert kept.tolist() == [[[0, 2]]]


def test_is_the_negated_cosine_to_the_mean_direction():
    view = layer_view(layer_facts(), None, num_tokens=30)
    keys = view.keys.double()
    for head in range(2):
        directions = [key / key.norm() for key in keys[head]]
        anchor = sum(directions) / len(directions)
        expected = [-float(key @ anchor / key.norm() / anchor.norm()) for key in keys[head]]
        torch.testing.assert_close(KeyDiff().score(view)[head], torch.tensor(expected), atol=1e-6, rtol=0)


def test_does_not_see_the_length_of_a_key():
    view = layer_view(layer_facts(), None)
    longer = with_kv(view, keys=view.keys * torch.arange(1.0, 10.0)[:, None])
    torch.testing.assert_close(KeyDiff().score(longer), KeyDiff().score(view))


def test_is_the_ratio_of_the_norms():
    keys = torch.tensor([[[3.0, 4.0], [0.6, 0.8]], [[5.0, 12.0], [0.0, 2.0]]])
    values = torch.tensor([[[10.0, 0.0], [0.0, 3.0]], [[0.0, 26.0], [3.0, 4.0]]])
    view = with_kv(layer_view(layer_facts(head_dim=2), None, num_tokens=2), keys, values)
    torch.testing.assert_close(PagedEviction().score(view), torch.tensor([[2.0, 3.0], [2.0, 2.5]]))


def test_moves_nothing_and_takes_whole_blocks():
    assert PagedEviction().eviction_method is EvictionMethod.BLOCKS


VIEW = layer_view(layer_facts(), None, num_tokens=2000, logical_len=2500)
CHANGES = {
    "layer": {"layer": 1},
    "pass": {"logical_len": 2501},
    "heads": {"first_head": 2},
}


def correlation(ours, other):
    return abs(float(torch.corrcoef(torch.stack([ours, other]))[0, 1]))


def test_is_uniform():
    scores = Random().score(VIEW)
    assert ((scores >= 0) & (scores < 1)).all()
    counts = torch.histc(scores, bins=10, min=0, max=1)
    assert (counts - 400).abs().max() < 5 * (4000 * 0.1 * 0.9) ** 0.5


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_draw_is_its_own(change):
    scores = Random().score(VIEW)
    other = Random().score(dataclasses.replace(VIEW, **change))
    assert correlation(scores.flatten(), other.flatten()) < 0.1
    assert correlation(scores[0], scores[1]) < 0.12
    assert correlation(scores.flatten(), Random(seed=1).score(VIEW).flatten()) < 0.1


def test_does_not_read_the_global_generator():
    torch.manual_seed(1)
    first = Random().score(VIEW)
    torch.manual_seed(2)
    assert torch.equal(Random().score(VIEW), first)


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


LAG = 5


def a_view(num_tokens=18, start=2):
    view = layer_view(layer_facts(), None, num_tokens=num_tokens)
    return dataclasses.replace(view, candidates=slice(start, num_tokens - 2))


def softmaxed_spread(tokens, following):
    spreads = []
    for token in tokens.tolist():
        relative = []
        for channel, entry in enumerate(token):
            column = following[:, channel].tolist()
            extent = max(column) - min(column)
            relative.append((entry - min(column)) / extent if extent else 0.0)
        spreads.append(stdev(relative))
    weights = [math.exp(spread) for spread in spreads]
    return [weight / sum(weights) for weight in weights]


def expected(view, head):
    """Scores of the partitions that have a next one, as lists of LAG numbers."""
    start, total = view.candidates.start, view.source.shape[1]
    keys, values = (x[head].double() for x in view.source.tensors())
    out = []
    for at in range(start, start + ((total - start) // LAG - 1) * LAG, LAG):
        here, following = slice(at, at + LAG), slice(at + LAG, at + 2 * LAG)
        pairs = (softmaxed_spread(x[here], x[following]) for x in (keys, values))
        out.append([k + v for k, v in zip(*pairs, strict=True)])
    return out


@pytest.mark.parametrize("constant", [False, True])
def test_follows_the_formula(constant):
    view = a_view()
    if constant:
        keys = view.keys.clone()
        keys[..., 3] = 1.5
        view = with_kv(view, keys=keys)
    scores = LagKV(lag=LAG, cross=True).score(view)
    for head in range(2):
        flat = torch.tensor(list(chain(*expected(view, head))), dtype=torch.float32)
        torch.testing.assert_close(scores[head, 2:12], flat, atol=1e-6, rtol=1e-5)


def test_ranks_within_each_partition_as_published():
    view = a_view()
    scores = LagKV(lag=LAG).score(view)
    for head in range(2):
        for number, part in enumerate(expected(view, head)):
            ranks = [sorted(part).index(score) / LAG for score in part]
            at = 2 + number * LAG
            torch.testing.assert_close(scores[head, at : at + LAG], torch.tensor(ranks))


@pytest.mark.parametrize("cross", [False, True])
def test_what_has_no_next_partition_stays_newest_first(cross):
    """Two sinks, partitions 2-6, 7-11 and 12-16, and one token more."""
    scores = LagKV(lag=LAG, cross=cross).score(a_view())
    assert (scores[:, 12:].diff(dim=1) > 0).all()
    assert (scores[:, 12:].amin(dim=1) > scores[:, 2:12].amax(dim=1)).all()
    assert (scores[:, :2].amin(dim=1) > scores[:, 2:12].amax(dim=1)).all()


@pytest.mark.parametrize("num_tokens", [3, 11])
def test_fewer_than_two_partitions_keep_recent_tokens(num_tokens):
    assert (LagKV(lag=LAG).score(a_view(num_tokens)).diff(dim=1) > 0).all()
