"""Tokens that a row keeps, found among few candidates, are those of sorting the whole vocabulary."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest
import torch

from kvreclaim import SamplingParams
from kvreclaim.engine.sampling import sampler
from kvreclaim.engine.sampling.sampler import Cut, gumbel

VOCAB = 5000
CUTS = [
    *(Cut(0, 0.0, 0.0), Cut(0, 0.3, 0.0), Cut(40, 1.0, 0.0), Cut(2000, 0.999, 0.0)),
    *(Cut(0, 1.0, 0.05), Cut(50, 0.8, 0.2)),
]


def kept_by_definition(logits: torch.Tensor, cut: Cut) -> list[int]:
    probs = logits.double().softmax(-1)
    order = probs.argsort(descending=True).tolist()
    order = order[: cut.top_k] if cut.top_k > 0 else order
    total = sum(float(probs[t]) for t in order)
    kept, reached = [], 0.0
    for token in order:
        if kept and reached / total >= cut.top_p:
            break
        kept.append(token)
        reached += float(probs[token])
    return [t for t in kept if probs[t] >= cut.min_p * probs[order[0]]]


def winner(logits: torch.Tensor, key: torch.Tensor, cut: Cut) -> int:
    race = logits.double().log_softmax(-1) + gumbel(key, torch.arange(len(logits)))
    return max(kept_by_definition(logits, cut), key=lambda t: float(race[t]))


def drawn(logits: torch.Tensor, keys: torch.Tensor, cuts: list[Cut]) -> list[int]:
    rows = [
        SimpleNamespace(params=SamplingParams(top_k=cut.top_k, top_p=cut.top_p, min_p=cut.min_p))
        for cut in cuts
    ]
    return sampler._draw(logits, rows, keys)


def random_keys(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_rows_of_all_kinds_at_once(spread: float) -> None:
    """A flat distribution needs the whole vocabulary, a peaked one a few tokens."""
    generator = torch.Generator().manual_seed(3)
    logits = spread * torch.randn(len(CUTS), VOCAB, generator=generator)
    keys = random_keys(len(CUTS), generator)
    want = [winner(logits[i], keys[i], cut) for i, cut in enumerate(CUTS)]
    assert drawn(logits, keys, CUTS) == want


def test_the_number_of_candidates_changes_nothing(monkeypatch) -> None:
    random = Random(5)
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        logits, keys = torch.randn(2, 50, generator=generator), random_keys(2, generator)
        cuts = [Cut(random.randint(-1, 60), random.uniform(0.01, 0.99), random.random())] * 2
        monkeypatch.setattr(sampler, "SIZES", (random.randint(1, 49),))
        few = drawn(logits, keys, cuts)
        monkeypatch.setattr(sampler, "SIZES", ())
        assert few == drawn(logits, keys, cuts) == [winner(logits[i], keys[i], cuts[0]) for i in range(2)]
