"""Chance, but the same chance each time."""

import dataclasses

import pytest
import torch
from compression_oracles import layer_facts, layer_view

from kvreclaim.compression.policies.random import Random

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
