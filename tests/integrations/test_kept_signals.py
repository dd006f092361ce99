"""Signals kept by hooks: scores lie beside the slots of any cache and move with them; queries by request."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from test_applier import FakeRows, make_pass, output
from test_head_cells import SETTINGS, Request, Walk, make_layers
from torch import Tensor
from toy_caches import B, D, K, L, S
from toy_caches import make_layers as make_plain_layers

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.kvzap import token_scores
from kvreclaim.compression.registry import make_policy
from kvreclaim.integrations.vllm.scheduler.passes import StepMessage
from kvreclaim.integrations.vllm.settings.layer_needs import query_window, signal_bytes
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.worker.layer_signals import KeptSignals, StepTokens
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.integrations.vllm.worker.signal_applier import SignalApplier
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.testing.toys import HIDDEN_SIZE, layer_facts, model_facts, noise, query_stats

FACTS = ModelFacts(
    "toy", model_facts().fingerprint, (layer_facts(head_dim=D),) * L, torch.float32, torch.device("cpu"), 4096
)
STATS = tuple(query_stats(FACTS).layer(n) for n in range(L))


class Watch:
    """Stands in for the hooks."""

    def show_to(self, signals: KeptSignals) -> None:
        self.signals = signals


def make_applier(settings: CompressionConfig, views: CacheViews, *heads: object) -> SignalApplier:
    return SignalApplier(Watch(), Options(settings), FACTS, STATS, views, FakeRows(), *heads)


class ScoredWalk(Walk):
    """A third thing beside each key and value."""

    applier: SignalApplier

    def make_applier(self) -> SignalApplier:
        return make_applier(self.settings, self.views, self.heads)

    def grow(self, request: Request, count: int) -> None:
        super().grow(request, count)
        slots = range(request.length - count, request.length)
        where = torch.tensor([request.blocks[slot // S] * S + slot % S for slot in slots])
        for n in range(L):
            scores = torch.randn(count, K).half().float()
            self.applier.signals.scores.write(n, where, scores)
            for h in range(K):
                rows = request.tokens[n][h]
                rows[-count:] = [(*row[:2], x) for row, x in zip(rows[-count:], scores[:, h], strict=True)]

    def drop(self, request: Request, positions: Tensor) -> None:
        """The pass keeps the best of each head, by the scores in the lists."""
        before = [[list(row) for row in rows] for rows in request.tokens]
        super().drop(request, positions)
        sinks, recent = self.settings.sinks, self.settings.recent
        for n in range(L):
            for h in range(K):
                tail = recent + len(before[n][h]) % S
                free = sorted((float(x) for *_, x in before[n][h][sinks : len(before[n][h]) - tail]))
                kept = [float(x) for *_, x in request.tokens[n][h]]
                kept = sorted(kept[sinks : len(kept) - tail])
                assert kept == free[len(free) - len(kept) :]


@pytest.mark.parametrize(
    ("make", "alternating"), [("plain", False), ("plain", True), ("paired", False), ("transposed", False)]
)
def test_scores_go_where_their_tokens_go(make: str, alternating: bool) -> None:
    """A walk of requests with unequal heads, by the scores alone."""
    rng = random.Random(f"{make} {alternating}")
    torch.manual_seed(2)
    walk = ScoredWalk(make_layers(make, alternating), replace(SETTINGS, policy="shares(kvzap)"))
    num_passes = sum(walk.step(number, rng) for number in range(40))
    assert num_passes > 5


@pytest.mark.parametrize("make", ["plain", "paired"])
def test_equal_heads_move_with_their_scores(make: str) -> None:
    settings = CompressionConfig(policy="kvzap", budget=16, interval=8, sinks=2, recent=4)
    applier = make_applier(settings, CacheViews(make_plain_layers(make), B))
    blocks, scores = (1, 2, 3), torch.randn(L, 24, K).half().float()
    slots = torch.tensor([block * S + place for block in blocks for place in range(S)])
    for n in range(L):
        applier.signals.scores.write(n, slots, scores[n])
    step = output(make_pass("a", blocks, (1, 8), 24))
    step.kvreclaim = StepMessage(step.kvreclaim.passes, {"a": settings})
    applier.begin(step)
    for n in range(L):
        found = applier.signals.scores.of(n, torch.tensor([1, 8]), 16)
        for h in range(K):
            best = scores[n, 2:20, h].topk(10).indices.sort().values + 2
            slots_kept = torch.cat([torch.arange(2), best, torch.arange(20, 24)])
            assert torch.equal(found[h], scores[n, slots_kept, h])


def test_hidden_states_are_scored_in_their_slots() -> None:
    settings = CompressionConfig(policy="kvzap", budget=16, interval=8, sinks=2, recent=4)
    kept = make_applier(settings, CacheViews(make_plain_layers("plain"), B)).signals
    slots = torch.tensor([9, 10, 40])
    hidden = noise(3, 5, HIDDEN_SIZE)  # two rows of padding
    kept.begin(StepTokens((("a", 0, 2), ("b", 7, 1)), slots))
    kept.see_hidden(1, hidden)
    expected = token_scores(hidden[:3], STATS[1]).half().float()
    assert torch.equal(kept.scores.of(1, torch.tensor([1]), 3)[:, 1:3], expected[:2].T)
    assert torch.equal(kept.scores.of(1, torch.tensor([5]), 1)[:, 0], expected[2])


def test_queries_are_kept_by_request_until_it_is_gone() -> None:
    settings = CompressionConfig(policy="snapkv(window=4)", budget=16, interval=8, sinks=2, recent=4)
    applier = make_applier(settings, CacheViews(make_plain_layers("plain"), B))
    kept, heads = applier.signals, FACTS.layers[0].num_heads
    seen = {"a": noise(1, 9, heads, D), "b": noise(2, 6, heads, D)}
    for a, b in (((0, 6), (3, 4)), ((6, 7), (4, 6)), ((7, 9), (6, 6))):
        chunks = [(name, start, end - start) for name, (start, end) in zip("ab", (a, b), strict=True)]
        rows = torch.cat([seen[name][start : start + count] for name, start, count in chunks])
        kept.begin(StepTokens(tuple(chunk for chunk in chunks if chunk[2]), torch.empty(0)))
        kept.see_queries(1, torch.cat([rows, torch.randn(2, heads, D)]).flatten(1))
    compressor, nothing = applier.compressor(settings), torch.empty(0)
    for name, end, first in (("a", 9, 5), ("b", 6, 3)):  # b's first three were hit
        found = kept.source(compressor, name, end, nothing, 0)(1).queries
        assert torch.equal(found, seen[name][first:].transpose(0, 1))
    applier.begin(output(finished={"b"}))
    assert "b" not in kept.queries
    assert "a" in kept.queries


@pytest.mark.parametrize("policy", ["snapkv", "kvzap", "ada_kv(r_kv)"])
def test_rehearsals_have_signals(policy: str) -> None:
    settings = CompressionConfig(policy=policy, budget=16, interval=8, sinks=2, recent=4)
    make_applier(settings, CacheViews(make_plain_layers("plain"), B)).rehearse()


def test_what_signals_take_of_a_pool() -> None:
    def taken(policy: str, available: int = 10**6) -> int:
        found = make_policy(policy)
        return signal_bytes(found, 16, available, num_heads=8, head_bytes=256, num_rows=4)

    assert taken("knorm") == 0
    assert taken("snapkv(window=10)") == 10 * 8 * 256 * 4 * 3 // 2
    assert query_window(make_policy("ada_kv(snapkv(window=10))"), 16) == 25
    assert taken("snapkv", 1000) == 1000
    scores = taken("kvzap")  # two bytes beside a key and a value of 256 each
    assert abs(scores * 512 - (10**6 - scores) * 2) < 1024
