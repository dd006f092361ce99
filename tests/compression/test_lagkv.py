"""LagKV against its formula, one number at a time."""

import dataclasses
import math
from itertools import chain
from statistics import stdev

import pytest
import torch
from compression_oracles import layer_facts, layer_view, with_kv

from kvreclaim.compression.policies.lagkv import LagKV

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
