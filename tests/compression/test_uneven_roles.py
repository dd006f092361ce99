"""Named spans and segment quotas where heads keep unequal numbers, against kept sets made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from compression_oracles import model_facts, noise, query_stats
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.head_shares import FRACTIONS
from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.policy import LayerSignals
from kvreclaim.compression.uneven import choose_uneven
from kvreclaim.ops.key_source import DenseSource

SINKS, RECENT, END = 2, 3, 70
HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]
NAMED = {*range(10, 16), 40, 41}
SPANS = "spans=((10, 16), (40, 42))"


def random_heads(seed, lengths, spread=1):
    """Four heads: their positions, scores (norms of their keys: whole numbers, all different), and the
    HeadsQuestion about them."""
    random, held, scores, keys = np.random.default_rng(seed), {}, {}, {}
    for i, (at, count) in enumerate(zip(HEADS, lengths, strict=True)):
        held[at] = sorted(random.permutation(END)[:count].tolist())
        scores[at] = (random.permutation(300)[:count] * 4 + i + 1 + 400 * spread * i).tolist()
        keys[at] = torch.tensor(scores[at], dtype=torch.float32)[None, :, None] * torch.eye(8)[0]

    def source(layer, head):
        return DenseSource(keys[layer, head], noise(seed + layer, *keys[layer, head].shape))

    def own(layer, head):
        return {"positions": torch.tensor([held[layer, head]], dtype=torch.int32)}

    tokens = np.array(lengths).reshape(2, 2)
    question = HeadsQuestion(source, lambda _: LayerSignals(), tokens, 0 * tokens, END, False, own)
    return held, scores, question


def chosen(policy, question, budget, size=1):
    config = CompressionConfig(policy, budget, sinks=SINKS, recent=RECENT, interval=size)
    facts = model_facts(2)
    shares = torch.linspace(0.1, 1, 4).view(2, 2, 1).expand(2, 2, len(FRACTIONS)).contiguous()
    compressor = Compressor(config, facts, replace(query_stats(facts), head_shares=shares))
    (choice,) = choose_uneven(compressor, [question], size)
    return {at: choice.kept[at[0]][at[1]].tolist() for at in HEADS}


def best(slots, scores, count):
    return sorted(slots, key=lambda slot: (-scores[slot], slot))[:count]


def by_threshold(held, scores, budget, named):
    """The slots that each head keeps. The highest scores of all heads say how many, beside the ends and the
    named tokens that a budget has room for; named ones are the first of them."""
    ends, first, rivals = {}, {}, []
    for at in HEADS:
        count = len(held[at])
        ends[at] = {*range(SINKS), *range(count - RECENT, count)}
        inner = set(range(count)) - ends[at]
        first[at] = {slot for slot in inner if held[at][slot] in named}
        apart = best(first[at], scores[at], budget - len(ends[at]))
        rivals += [(-scores[at][slot], at, slot) for slot in inner - {*apart}]
        rivals += [(-np.inf, at, slot) for slot in apart]
    places = (budget - SINKS - RECENT) * len(HEADS)
    kept = {}
    for at in HEADS:
        places_here = sum(owner == at for _, owner, _ in sorted(rivals)[:places])
        named_here = best(first[at], scores[at], places_here)
        rest = set(range(len(held[at]))) - ends[at] - first[at]
        others = best(rest, scores[at], places_here - len(named_here))
        kept[at] = sorted({*ends[at], *named_here, *others})
    return kept


lengths = st.lists(st.integers(50, 64), min_size=4, max_size=4)


@given(
    policy=st.sampled_from(
        (
            f"shares(protect(knorm(keep=large), {SPANS}))",
            f"protect(shares(knorm(keep=large)), {SPANS})",
            f"protect(shares(protect(knorm(keep=large), {SPANS.replace(', (40, 42)', ',')})), {SPANS})",
        )
    ),
    lengths=lengths,
    budget=st.integers(6, 48),
    spread=st.sampled_from((0, 1, 8)),
    seed=st.integers(0, 999),
)
def test_shares_with_protected_spans_keep_what_a_loop_keeps(policy, lengths, budget, spread, seed):
    """A budget below 13 has no room for all that is named: each head keeps the best of it."""
    held, scores, question = random_heads(seed, lengths, spread)
    assert chosen(policy, question, budget) == by_threshold(held, scores, budget, NAMED)


@given(lengths=lengths, budget=st.integers(6, 48), seed=st.integers(0, 999), n=st.sampled_from((2, 5)))
def test_segments_share_out_the_places_of_each_head(lengths, budget, seed, n):
    held, scores, question = random_heads(seed, lengths, spread=1)
    counts = {at: len(kept) for at, kept in by_threshold(held, scores, budget, ()).items()}
    for policy in ("shares(segments({}, {n}))", "segments(shares({}), {n})"):
        found = chosen(policy.format("knorm(keep=large)", n=n), question, budget)
        for at in HEADS:
            ends = {*range(SINKS), *range(lengths[HEADS.index(at)] - RECENT, lengths[HEADS.index(at)])}
            inner = [slot for slot in range(len(held[at])) if slot not in ends]
            free, kept = counts[at] - len(ends), set()
            groups = [[s for s in inner if held[at][s] * n // END == group] for group in range(n)]
            groups = [best(group, scores[at], len(group)) for group in groups]
            while len(kept) < free // 2:
                turn = best([group.pop(0) for group in groups if group], scores[at], free // 2 - len(kept))
                kept |= set(turn)
            kept |= set(best(set(inner) - kept, scores[at], free - len(kept)))
            assert set(found[at]) == kept | ends


@pytest.mark.parametrize(
    "policy",
    [
        "ada_kv(protect({}, {}), alpha=0)",
        "protect(ada_kv({}), {})",
        "pyramidkv(protect({}, {}), beta=20)",
        "protect(pyramidkv({}, beta=20), {})",
        "shares(protect({}, {}), by=static)",
        "protect(shares({}, by=static), {})",
        "segments(shares(protect({}, {})), n=3)",
        "shares(protect(segments({}, n=3), {}))",
        "protect(critical(shares({})), {})",
    ],
)
@pytest.mark.parametrize("size", [1, 4])
def test_every_head_keeps_every_named_token_and_the_budget_holds(policy, size):
    for seed in range(5):
        held, _, question = random_heads(seed, (50, 64, 57, 51), spread=8)
        projection = LayerSignals(output_projection=noise(seed, 4, 8, 6))
        question = replace(question, signals=lambda _, found=projection: found)
        found = chosen(policy.format("knorm(keep=large)", SPANS), question, 24, size)
        assert sum(map(len, found.values())) == 24 * 4
        for at in HEADS:
            assert len(found[at]) % size == 0
            assert NAMED & {*held[at]} <= {held[at][slot] for slot in found[at]}
