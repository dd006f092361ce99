"""What a row keeps, found among few candidates, is what sorting the whole vocabulary keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreclaim.engine.sampling import sampler
from kvreclaim.engine.sampling.sampler import Cut, race_among_kept

VOCAB = 3000


def kept_by_definition(logits: torch.Tensor, cut: Cut) -> list[int]:
    probs = logits.double().softmax(-1)
    order = probs.argsort(descending=True).tolist()
    order = order[: cut.top_k] if cut.top_k > 0 else order
    total = sum(float(probs[t]) for t in order)
    kept, reached = [], 0.0
    for token in order:
        if reached / total >= cut.top_p:
            break
        kept.append(token)
        reached += float(probs[token])
    return [t for t in kept if probs[t] >= cut.min_p * probs[order[0]]]


def winner(logits: torch.Tensor, race: torch.Tensor, cut: Cut) -> int:
    return max(kept_by_definition(logits, cut), key=lambda t: float(race[t]))


CUTS = [Cut(0, 0.3, 0.0), Cut(40, 1.0, 0.0), Cut(2000, 0.999, 0.0), Cut(0, 1.0, 0.05), Cut(50, 0.8, 0.2)]


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_rows_of_all_kinds_at_once(spread: float) -> None:
    """A flat distribution needs the whole vocabulary, a peaked one a few tokens."""
    generator = torch.Generator().manual_seed(3)
    logits = spread * torch.randn(len(CUTS), VOCAB, generator=generator)
    race = torch.randn(len(CUTS), VOCAB, generator=generator)
    want = [winner(logits[i], race[i], cut) for i, cut in enumerate(CUTS)]
    assert race_among_kept(logits, race, CUTS).tolist() == want


@given(
    st.integers(0, 10_000),
    st.integers(-1, 60),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.integers(1, 64),
)
@settings(max_examples=60, deadline=None)
def test_the_number_of_candidates_changes_nothing(seed, top_k, top_p, min_p, candidates) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, race = torch.randn(2, 50, generator=generator), torch.randn(2, 50, generator=generator)
    cuts = [Cut(top_k, top_p, min_p)] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "CANDIDATES", candidates)
        few = race_among_kept(logits, race, cuts)
        patch.setattr(sampler, "CANDIDATES", 50)
        assert torch.equal(few, race_among_kept(logits, race, cuts))
