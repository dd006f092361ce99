"""Protected tokens outlive all others, in every mode, and by whole blocks too."""

import dataclasses

import pytest
import torch
from compression_oracles import layer_facts, layer_signals, layer_view, model_facts, noise
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.protect import Protect
from kvreclaim.compression.policy import Mode
from kvreclaim.compression.registry import make_policy
from kvreclaim.compression.wrapping import lift, ranked
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.schedule.budget.protection import Rules, candidates, kept_prompt_slots


def positions(*held, heads=2):
    return dataclasses.replace(
        layer_signals(layer_facts(), 9, 9),
        positions=torch.tensor(held, dtype=torch.int32).expand(heads, -1),
    )


def test_positions_are_those_of_the_text():
    """At L = 100: the first 5, the last 10, and 40 to 49."""
    held = [0, 4, 5, 39, 40, 49, 50, 89, 90]
    view = dataclasses.replace(layer_view(layer_facts(), None), logical_len=100, signals=positions(*held))
    plain = Knorm().score(view)
    scores = ranked(Protect(Knorm(), first=5, last=10, spans=((40, 50),)), view, plain)
    lifted = scores > plain
    assert lifted.tolist() == [[p in (0, 4, 40, 49, 90) for p in held]] * 2
    others = scores.masked_fill(lifted, -torch.inf).amax(dim=1)
    assert (scores.masked_fill(~lifted, torch.inf).amin(dim=1) > others).all()


@pytest.mark.parametrize("mode", list(Mode))
def test_no_other_token_outlives_them(mode):
    config = CompressionConfig(
        "protect(knorm, spans=((3, 6), (20, 22)))", budget=9, sinks=1, recent=2, mode=mode
    )
    signals = positions(*range(30))
    scale = [1.0, 1000.0, 0.001]
    compressor = Compressor(config, model_facts())
    kept = compressor.choose(
        lambda n: DenseSource(scale[n] * noise(n, 2, 30, 8), noise(9, 2, 30, 8)),
        30,
        0,
        30,
        signals=lambda _: signals,
    )
    for row in kept.flatten(0, 1).tolist():
        assert {0, 3, 4, 5, 20, 21, 28, 29} <= set(row)


def test_too_many_compete_by_the_inner_score():
    keys = noise(3, 2, 12, 8)
    config = CompressionConfig("protect(knorm, first=8)", budget=5, sinks=0, recent=1)
    compressor = Compressor(config, model_facts(1))
    kept = compressor.choose(
        lambda _: DenseSource(keys, keys), 12, 0, 12, signals=lambda _: positions(*range(12))
    )
    best = keys[:, :8].norm(dim=-1).argsort(dim=1)[:, :4].sort().values
    assert kept[0, :, :4].tolist() == best.tolist()


def test_a_block_with_one_protected_token_outlives_all_without():
    view = layer_view(layer_facts(), None, num_tokens=64, logical_len=64)
    view = dataclasses.replace(view, signals=positions(*range(64)))
    for token in (0, 17, 63):
        policy = Protect(make_policy("paged_eviction"), spans=((token, token + 1),))
        blocks = ranked(policy, view, policy.score(view)).unflatten(1, (-1, 16)).mean(dim=(0, 2))
        assert blocks.argmax().item() == token // 16


def test_nothing_named_is_the_inner_ranking():
    view = dataclasses.replace(layer_view(layer_facts(), None), signals=positions(*range(9)))
    assert torch.equal(ranked(Protect(Knorm()), view, Knorm().score(view)), Knorm().score(view))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("offset", [0.0, 1.0, -1e6])
def test_lifted_tokens_are_above_at_any_scale(scale, offset):
    scores = noise(5, 3, 50) * scale + offset
    chosen = noise(6, 3, 50) > 0.5
    lifted = lift(scores, chosen)
    assert torch.equal(lifted[~chosen], scores[~chosen])
    for row, mask in zip(lifted, chosen, strict=True):
        assert row[mask].min() > row[~mask].max()


@pytest.mark.parametrize("inner", ["full", "quest", "streaming_llm(positions=cache)"])
def test_refuses_what_ranks_no_tokens_by_position(inner):
    name = make_policy(inner).name
    with pytest.raises(InvalidArgumentError, match=rf"protect\({name}\) is refused: {name} "):
        make_policy(f"protect({inner})")


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
    """The candidates, where tokens must go: the free slots, and the prompt's where not all of it can stay."""
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
