"""What protection leaves, in numbers, against counting slot by slot."""

import pytest
import torch
from compression_oracles import model_facts, noise
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.schedule.budget.protection import Rules, candidates, kept_prompt_slots

FACTS = model_facts(1)


@st.composite
def lengths(draw):
    sinks, recent = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    keep = sinks + recent + draw(st.integers(1, 9))
    num_tokens = draw(st.integers(1, 40))
    rules = Rules(sinks=sinks, recent=recent, protect_prompt=draw(st.booleans()))
    return num_tokens, draw(st.integers(0, num_tokens)), keep, rules


def rank(slot, num_tokens, prompt_slots, rules):
    """How hard a slot is to lose."""
    if slot < rules["sinks"] or slot >= num_tokens - rules["recent"]:
        return 2
    return int(rules["protect_prompt"] and slot < prompt_slots)


@given(lengths())
def test_slots_that_stay_in_every_ranking(case):
    """Losing the hardest last, whatever the order within a rank: the same number of prompt slots is left."""
    num_tokens, prompt_slots, keep, rules = case
    left = kept_prompt_slots(num_tokens=num_tokens, prompt_slots=prompt_slots, keep=keep, **rules)
    if not rules["protect_prompt"]:
        assert left == (prompt_slots if num_tokens <= keep else 0)
        return
    for direction in (1, -1):
        order = sorted(
            range(num_tokens), key=lambda s: (-rank(s, num_tokens, prompt_slots, rules), direction * s)
        )
        assert sum(slot < prompt_slots for slot in order[:keep]) == left


@given(lengths())
def test_candidates_are_the_slots_that_a_choice_is_made_among(case):
    """With something to lose: the free slots, and the prompt's where not all of it can stay."""
    num_tokens, prompt_slots, keep, rules = case
    found = candidates(num_tokens=num_tokens, prompt_slots=prompt_slots, keep=keep, **rules)
    ranks = [rank(slot, num_tokens, prompt_slots, rules) for slot in range(num_tokens)]
    whole = sum(r >= 1 for r in ranks) <= keep
    free = [slot for slot, r in enumerate(ranks) if r == 0 or (r == 1 and not whole)]
    if num_tokens > keep:
        assert list(range(num_tokens))[found] == free


@given(lengths(), st.integers(0, 5))
def test_a_compressor_keeps_what_is_counted(case, below):
    """Also where more is kept than its budget."""
    num_tokens, prompt_slots, keep, rules = case
    budget = max(rules["sinks"] + rules["recent"] + 1, keep - below)
    compressor = Compressor(CompressionConfig("knorm", budget=budget, **rules), FACTS)
    left = kept_prompt_slots(num_tokens=num_tokens, prompt_slots=prompt_slots, keep=keep, **rules)
    source = DenseSource(noise(1, 2, num_tokens, 8), noise(2, 2, num_tokens, 8))
    kept = compressor.choose(lambda _: source, num_tokens, prompt_slots, num_tokens, keep=keep)
    assert kept.shape == (1, 2, min(keep, num_tokens))
    if rules["protect_prompt"]:
        assert (kept < prompt_slots).sum(-1).tolist() == [[left, left]]


@pytest.mark.parametrize("keep", [8, 11, 12])
def test_of_more_places_the_best_take_them(keep):
    """What a compressor with that budget keeps."""
    source = DenseSource(noise(1, 2, 12, 8), noise(2, 2, 12, 8))
    rules = Rules(sinks=1, recent=2, protect_prompt=True)
    small, large = (Compressor(CompressionConfig("knorm", budget=b, **rules), FACTS) for b in (6, keep))
    kept = small.choose(lambda _: source, 12, 7, 20, keep=keep)
    assert torch.equal(kept, large.choose(lambda _: source, 12, 7, 20))


def test_fewer_places_than_the_budget_are_our_own_mistake():
    compressor = Compressor(CompressionConfig("knorm", budget=6, sinks=1, recent=2), FACTS)
    with pytest.raises(AssertionError, match="5 tokens to keep, below the budget of 6"):
        compressor.choose(lambda _: None, 12, 0, 12, keep=5)
