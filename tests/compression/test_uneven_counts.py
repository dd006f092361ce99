"""Counts rounded to whole blocks, and the view of one head alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from compression_oracles import model_facts, noise, query_stats
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.head_shares import FRACTIONS
from kvreclaim.compression.head_views import HeadsQuestion, head_view
from kvreclaim.compression.policies.ada_kv import AdaKV
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policy import CountsQuestion, LayerSignals, LayerView, Mode
from kvreclaim.compression.select import select
from kvreclaim.compression.stats import LayerStats
from kvreclaim.compression.uneven import choose_uneven, round_to_blocks
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.key_source import DenseSource


def blocks(counts, size, protected, most, total):
    counts = np.atleast_2d(np.array(counts, dtype=float))
    protected, most = (np.broadcast_to(each, counts.shape) for each in (protected, most))
    return round_to_blocks(counts, size, protected, most, total).tolist()


def test_the_largest_remainders_gain_a_block():
    assert blocks([[26.0, 43.0, 43.0]], 16, 0, 9, 7) == [[1, 3, 3]]
    assert blocks([[15.0, 26.0, 23.0]], 16, 0, 9, 4) == [[1, 2, 1]]
    assert blocks([[16.0, 32.0], [0.0, 48.0]], 16, 0, 9, 6) == [[1, 2], [1, 2]]


def test_of_equal_remainders_the_first_head_gains_and_the_last_loses():
    assert blocks([[24.0, 24.0], [24.0, 24.0]], 16, 0, 9, 6) == [[2, 2], [1, 1]]
    assert blocks([[4.0, 4.0, 56.0, 56.0]], 16, 17, 9, 8) == [[2, 2, 2, 2]]
    assert blocks([[4.0, 40.0, 40.0, 4.0]], 16, 1, 9, 5) == [[1, 2, 1, 1]]


def test_every_head_keeps_its_protected_tokens_and_none_more_than_it_has():
    assert blocks([[2.0, 2.0, 92.0]], 16, 1, 9, 6) == [[1, 1, 4]]
    assert blocks([[96.0, 0.0, 0.0]], 16, 0, [[3, 2, 9]], 6) == [[3, 2, 1]]


def test_no_head_is_left_without_a_block():
    assert blocks([[0.0, 0.0, 96.0]], 16, 0, 9, 6) == [[1, 1, 4]]
    assert blocks([[0.0, 48.0], [0.0, 16.0]], 16, 0, 9, 4) == [[1, 1], [1, 1]]


def test_one_head_may_gain_twice_before_another_gains_once():
    assert blocks([[0.004, 4.4, 4.4, 2.2]], 1, 1, [[2, 2, 4, 4]], 11) == [[1, 2, 4, 4]]


def test_a_sum_that_cannot_be_is_our_own_mistake():
    with pytest.raises(AssertionError, match="9 blocks"):
        blocks([[16.0, 16.0]], 16, 0, 2, 9)


def test_ada_kv_counts_of_its_paper_before_and_after_rounding():
    scores = [[torch.tensor([9, 8, 7, 1, 0.5, 0.4]), torch.tensor([3, 2.5, 0.3, 0.2, 0.1, 0.05])]]
    counts = AdaKV(inner=Knorm()).counts(CountsQuestion(scores, 0, 3, 0))
    assert counts.tolist() == [[4, 2]]
    assert blocks(counts.numpy(), 1, 0, 6, 6) == [[4, 2]]
    assert blocks(counts.numpy(), 3, 0, 2, 2) == [[1, 1]]


@given(data=st.data())
def test_no_other_rounding_is_nearer(data):
    """No other numbers of blocks with this sum and these bounds are closer in the sum of squares."""
    heads, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    protected = data.draw(st.integers(0, 2 * size))
    least = max(1, -(-protected // size))
    most = np.array([data.draw(st.integers(least, 5)) for _ in range(heads)])
    total = data.draw(st.integers(least * heads, int(most.sum())))
    shares = np.array([data.draw(st.floats(0, 1)) for _ in range(heads)]) + 1e-3
    counts = shares / shares.sum() * total * size
    found = round_to_blocks(counts[None], size, np.full((1, heads), protected), most[None], total)[0]
    assert found.sum() == total
    assert (found >= least).all()
    assert (found <= most).all()
    possible = itertools.product(*(range(least, top + 1) for top in most))
    best = min(float(((counts / size - p) ** 2).sum()) for p in possible if sum(p) == total)
    assert float(((counts / size - found) ** 2).sum()) <= best + 1e-9


def test_one_head_sees_what_is_its_own():
    torch.manual_seed(0)
    facts = LayerFacts(num_heads=6, num_kv_heads=3, head_dim=4, v_head_dim=4, softmax=Softmax(0.5))
    stats = LayerStats(torch.randn(6, 4), torch.randn(6, 2), torch.randn(3, 5, 4), torch.randn(3, 5, 4))
    signals = LayerSignals(queries=torch.randn(6, 7, 4), output_projection=torch.randn(6, 4, 9))
    whole = LayerView(
        2,
        DenseSource(torch.randn(3, 8, 4), torch.randn(3, 8, 4)),
        20,
        facts,
        stats,
        slice(1, 6),
        signals=signals,
        first=False,
        budget=5,
    )
    own = DenseSource(torch.randn(1, 9, 4), torch.randn(1, 9, 4))
    view = head_view(whole, 1, own, slice(1, 7))
    assert (view.facts.num_heads, view.facts.num_kv_heads, view.facts.group_size) == (2, 1, 2)
    assert (view.layer, view.logical_len, view.first, view.first_head, view.budget) == (2, 20, False, 1, 5)
    assert view.source is own
    assert view.candidates == slice(1, 7)
    assert torch.equal(view.stats.q_mean, stats.q_mean[2:4])
    assert torch.equal(view.stats.centers, stats.centers[1:2])
    assert torch.equal(view.signals.queries, signals.queries[2:4])
    assert torch.equal(view.signals.output_projection, signals.output_projection[2:4])
    assert view.signals.mass is None


@given(
    first=st.booleans(),
    protect=st.booleans(),
    any_heads=st.booleans(),
    prompt=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_every_head_keeps_what_selecting_among_its_tiers_gives(first, protect, any_heads, prompt, seed):
    """All heads at once, from runs of slots, against one head at a time by the tiers of its tokens."""
    size, facts = 4, model_facts(2)
    config = CompressionConfig(
        "ada_kv(knorm(keep=large))", 24, sinks=3, recent=6, protect_prompt=protect, interval=8
    )
    compressor = Compressor(config, facts)
    rng = np.random.default_rng(seed)
    tokens = np.full((2, 2), 40) if first else rng.integers(24, 60, (2, 2))
    prompts = np.full((2, 2), min(prompt, 40)) if first else np.minimum(prompt, tokens)
    keys = [[noise(seed + 2 * n + h, 1, int(tokens[n, h]), 8).round() for h in (0, 1)] for n in (0, 1)]

    def source(layer, head):
        rows = torch.cat(keys[layer]) if head is None else keys[layer][head]
        return DenseSource(rows, rows)

    question = HeadsQuestion(source, lambda _: LayerSignals(), tokens, prompts, 60, first)
    with patch.object(Knorm, "any_heads", any_heads):
        (choice,) = choose_uneven(compressor, [question], size)
    assert sum(len(slots) for rows in choice.kept for slots in rows) == 24 * 4
    for layer, head in np.ndindex(2, 2):
        kept, held = choice.kept[layer][head], int(tokens[layer, head])
        scores = torch.linalg.vector_norm(keys[layer][head], dim=-1)[None]
        tiers = compressor.tiers(held, int(prompts[layer, head]))
        wanted = select(scores, len(kept), tiers, Mode.PER_LAYER_HEAD)[0, 0]
        assert kept.tolist() == wanted.tolist()


def test_a_score_that_is_no_number_is_refused():
    facts = model_facts(2)
    compressor = Compressor(CompressionConfig("shares(knorm)", 24, sinks=3, recent=6), facts)
    rows = noise(1, 2, 40, 8)
    rows[1, 20] = torch.nan
    tokens = np.full((2, 2), 40)

    def source(layer, head):
        own = rows if head is None else rows[head, None]
        return DenseSource(own, own)

    question = HeadsQuestion(source, lambda _: LayerSignals(), tokens, 0 * tokens, 40, True)
    with pytest.raises(InvalidArgumentError, match="a score is NaN"):
        choose_uneven(compressor, [question], 4)


@given(
    policy=st.sampled_from(
        ("shares({}, floor={})", "shares({}, by=static, floor={})", "ada_kv({}, alpha={})", "pyramidkv({})")
    ),
    own=st.sampled_from((0.0, 0.3, 1.0)),
    size=st.sampled_from((1, 4, 16, 64)),
    sinks=st.just(0) | st.integers(1, 40),
    recent=st.just(0) | st.integers(1, 40),
    beside=st.integers(1, 100),
    protect=st.booleans(),
    seed=st.integers(0, 999),
)
def test_after_every_pass_each_head_holds_whole_blocks_and_at_least_one(
    policy, own, size, sinks, recent, beside, protect, seed
):
    """Where one head's scores and share are far above all others'. The sum is the budget's, protected tokens
    stay, and the same question has the same answer."""
    config = CompressionConfig(
        policy.format("knorm(keep=large)", own if "alpha" in policy else own / 5),
        sinks + recent + beside,
        size,
        sinks,
        recent,
        protect,
    ).in_blocks(size)
    facts, rng = model_facts(2), np.random.default_rng(seed)
    shares = torch.zeros(2, 2, len(FRACTIONS))
    shares.view(4, -1)[rng.integers(4)] = 1.0
    compressor = Compressor(config, facts, replace(query_stats(facts), head_shares=shares))
    gains = 100.0 ** rng.permutation(4).reshape(2, 2)
    end = config.budget + int(rng.integers(1, 2 * size + 1))
    tokens, prompts = np.full((2, 2), end), np.full((2, 2), rng.integers(1, end + 1))
    for first in (True, False, False):
        keys = [
            [noise(seed + h, 1, int(tokens[n, h]), 8) * float(gains[n, h]) for h in (0, 1)] for n in (0, 1)
        ]

        def source(layer, head, keys=keys):
            rows = torch.cat(keys[layer]) if head is None else keys[layer][head]
            return DenseSource(rows, rows)

        question = HeadsQuestion(source, lambda _: LayerSignals(), tokens, prompts, end, first)
        (choice,), (again,) = (choose_uneven(compressor, [question], size) for _ in range(2))
        held = choice.kept.counts
        assert held.sum() == 4 * config.budget
        assert (held >= size).all()
        assert (held % size == 0).all()
        for at in np.ndindex(2, 2):
            kept, last = choice.kept[at[0]][at[1]].tolist(), int(tokens[at])
            assert kept == sorted(set(kept) | {*range(sinks), *range(last - recent, last)})
            assert kept == again.kept[at[0]][at[1]].tolist()
        grown = int(rng.integers(size, 2 * size + 1))
        tokens, prompts, end = held + grown, choice.prompt_slots, end + grown
