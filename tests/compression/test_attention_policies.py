"""Policies that score by attention (TOVA, H2O, SnapKV, the oracle), against loops and published examples."""

import dataclasses

import pytest
import torch
from compression_oracles import attention_rows, layer_facts, layer_view, model_facts, noise, with_kv

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies import oracle, r_kv
from kvreclaim.compression.policies.h2o import H2O
from kvreclaim.compression.policies.oracle import Oracle
from kvreclaim.compression.policies.r_kv import RKV, summed_similarity
from kvreclaim.compression.policies.snapkv import SnapKV, pool
from kvreclaim.compression.policies.tova import TOVA
from kvreclaim.compression.policy import LayerSignals, Mode, Signal
from kvreclaim.ops.key_source import DenseSource

LAST_ROW = torch.tensor([0.25, 0.05, 0.35, 0.05, 0.1, 0.2])


def test_the_published_example():
    """Keys are unit vectors and the query is the logarithm of the row, so its softmax is the row."""
    facts = model_facts(1)
    logits = torch.zeros(8)
    logits[:6] = LAST_ROW.log() / facts.layers[0].softmax.scale
    signals = LayerSignals(queries=logits.expand(4, 1, 8))
    source = DenseSource(torch.eye(8)[:6].expand(2, -1, -1), noise(1, 2, 6, 8))
    compressor = Compressor(CompressionConfig("tova", budget=4, sinks=0, recent=0), facts)
    kept = compressor.choose(lambda _: source, 6, 6, 6, signals=lambda _: signals)
    assert kept.tolist() == [[[0, 2, 4, 5]] * 2]


def test_mean_over_all_heads_of_the_layer():
    view = layer_view(layer_facts(), None)
    rows = attention_rows(view, view.signals.queries[:, -1:], view.logical_len - 1)
    scores = TOVA().score(view)
    torch.testing.assert_close(scores.double(), rows.mean(dim=(0, 1)).expand(2, -1), rtol=1e-5, atol=1e-6)


def test_asks_for_one_query():
    assert TOVA().query_window == 1
    view = layer_view(layer_facts(), None)
    last = dataclasses.replace(view.signals, queries=view.signals.queries[:, -1:])
    torch.testing.assert_close(TOVA().score(dataclasses.replace(view, signals=last)), TOVA().score(view))


ROWS = [
    [1.0],
    [0.7, 0.3],
    [0.5, 0.1, 0.4],
    [0.4, 0.1, 0.3, 0.2],
    [0.3, 0.05, 0.4, 0.05, 0.2],
    [0.25, 0.05, 0.35, 0.05, 0.1, 0.2],
]


def test_the_published_example_of_h2o():
    mass = torch.zeros(6)
    for row in ROWS:
        mass[: len(row)] += torch.tensor(row)
    torch.testing.assert_close(mass, torch.tensor([3.15, 0.6, 1.45, 0.3, 0.3, 0.2]))
    compressor = Compressor(CompressionConfig("h2o", budget=4, sinks=0, recent=2), model_facts(1))
    source = DenseSource(noise(0, 2, 6, 8), noise(1, 2, 6, 8))
    signals = LayerSignals(mass=mass.expand(2, -1))
    kept = compressor.choose(lambda _: source, 6, 6, 6, signals=lambda _: signals)
    assert kept.tolist() == [[[0, 2, 4, 5]] * 2]


def test_heads_and_layers_choose_for_themselves():
    compressor = Compressor(CompressionConfig("h2o", budget=2, sinks=0, recent=1), model_facts(2))
    assert compressor.mode is Mode.PER_LAYER_HEAD
    source = DenseSource(noise(0, 2, 4, 8), noise(1, 2, 4, 8))
    mass = torch.tensor([[[9.0, 0, 0, 0], [0, 9, 0, 0]], [[0, 0, 9, 0], [1, 2, 0, 0]]])
    kept = compressor.choose(lambda _: source, 4, 4, 7, signals=lambda n: LayerSignals(mass=mass[n]))
    assert kept.tolist() == [[[0, 3], [1, 3]], [[2, 3], [1, 3]]]


def test_reads_the_mass_alone():
    view = layer_view(layer_facts(), None)
    bare = dataclasses.replace(view, signals=LayerSignals(mass=view.signals.mass))
    assert H2O().needs == {Signal.ATTENTION_MASS}
    assert torch.equal(H2O().score(bare), view.signals.mass)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("horizon", [None, 2, 99])
@pytest.mark.parametrize("aggregate", ["max", "sum"])
def test_oracle_equals_the_loop(aggregate, horizon, window):
    view = layer_view(layer_facts(window=window), None)
    rows = attention_rows(view, view.signals.future_queries, view.logical_len)[:, :horizon]
    over = rows.amax(1) if aggregate == "max" else rows.sum(1)
    got = Oracle(aggregate, horizon).score(view)
    torch.testing.assert_close(got.double(), over.view(2, 2, 9).amax(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregate", ["max", "sum"])
def test_queries_in_several_batches_give_the_same(aggregate, monkeypatch):
    view = layer_view(layer_facts(window=8), None)
    whole = Oracle(aggregate).score(view)
    monkeypatch.setattr(oracle, "MAX_LOGITS", 2 * 4 * 9)
    torch.testing.assert_close(Oracle(aggregate).score(view), whole)


def test_nothing_to_come_scores_nothing():
    view = layer_view(layer_facts(), None)
    ended = dataclasses.replace(view.signals, future_queries=noise(0, 4, 0, 8))
    assert Oracle().score(dataclasses.replace(view, signals=ended)).tolist() == [[0.0] * 9] * 2


def test_keeps_the_token_that_is_queried_once():
    """One of 50 coming queries looks at token 3, all others at token 6: both stay with "max"; with "sum"
    tokens that get a little from every query come before token 3."""
    facts = model_facts(1)
    keys = torch.zeros(2, 12, 8)
    keys[:, 3, 0], keys[:, 6, 1] = 40.0, 3.0
    queries = torch.zeros(4, 50, 8)
    queries[..., 1] = 1.0
    queries[:, 20, 0] = 1.0
    source, signals = DenseSource(keys, keys), LayerSignals(future_queries=queries)

    def kept(aggregate):
        options = {"aggregate": aggregate}
        config = CompressionConfig("oracle", budget=3, sinks=0, recent=1, options=options)
        chosen = Compressor(config, facts).choose(lambda _: source, 12, 12, 12, signals=lambda _: signals)
        return chosen[0, 0].tolist()

    assert kept("max") == [3, 6, 11]
    assert 6 in kept("sum")


CHECK = torch.tensor([[0.09, 0.5, 0.04, 0.07, 0.3, 0.06]])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("average", [0.1967, 0.21, 0.2033, 0.1367, 0.1433, 0.12]),
        ("max", [0.5, 0.5, 0.5, 0.3, 0.3, 0.3]),
    ],
)
def test_pooling_gives_the_published_numbers(pooling, expected):
    torch.testing.assert_close(pool(CHECK, 3, pooling), torch.tensor([expected]), rtol=0, atol=5e-5)


@pytest.mark.parametrize("pooling", ["average", "max"])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_pooling_keeps_short_lengths(pooling, length):
    assert pool(CHECK[:, :length], 5, pooling).shape == (1, length)


def loop(view, kernel, pooling, group):
    """[K, T - w] float64: sum over the window's rows, pooled by hand, then over the group."""
    rows = attention_rows(view, view.signals.queries, view.logical_len - 3)
    sums = rows[..., :-3].sum(dim=1)
    pooled = torch.zeros_like(sums)
    for j in range(sums.shape[1]):
        near = [j + d for d in range(-(kernel // 2), kernel // 2 + 1) if 0 <= j + d < sums.shape[1]]
        pooled[:, j] = sums[:, near].sum(1) / kernel if pooling == "average" else sums[:, near].amax(1)
    grouped = pooled.view(2, 2, -1)
    return grouped.mean(dim=1) if group == "mean" else grouped.amax(dim=1)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("pooling", ["average", "max"])
@pytest.mark.parametrize("group", ["mean", "max"])
def test_equals_the_loop_and_pools_only_before_anything_is_evicted(first, pooling, group):
    view = layer_view(layer_facts(), None, logical_len=9 if first else 40)
    scores = SnapKV(window=3, kernel=5, pooling=pooling, group=group).score(view)
    expected = loop(view, 5 if first else 1, pooling, group)
    torch.testing.assert_close(scores[:, :6].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_window_is_kept_without_any_protection():
    facts = model_facts(1)
    source = DenseSource(noise(0, 2, 40, 8), noise(1, 2, 40, 8))
    signals = LayerSignals(queries=noise(2, 4, 8, 8))
    config = CompressionConfig("snapkv", budget=12, sinks=0, recent=0, options={"window": 8})
    compressor = Compressor(config, facts)
    kept = compressor.choose(lambda _: source, 40, 40, 40, signals=lambda _: signals)
    assert kept[..., 4:].tolist() == [[list(range(32, 40))] * 2]
    few = Compressor(dataclasses.replace(config, budget=5), facts)
    newest = few.choose(lambda _: source, 40, 40, 40, signals=lambda _: signals)
    assert newest.tolist() == [[list(range(35, 40))] * 2]


def test_a_text_inside_the_window_is_all_window():
    view = layer_view(layer_facts(), None, num_tokens=3)
    assert SnapKV().score(view).tolist() == [[33.0, 34.0, 35.0]] * 2


def test_defaults_are_the_published_ones_but_for_decoding():
    policy = SnapKV()
    assert (policy.window, policy.kernel, policy.pooling, policy.query_window) == (32, 5, "average", 32)
    assert not policy.prompt_only
    assert SnapKV(when="prefill").prompt_only


def redundancy(keys, threshold, block):
    """[T] float64 of one head, pair by pair."""
    tokens = len(keys)
    total = torch.zeros(tokens, dtype=torch.float64)
    for i in range(tokens):
        peers = [j for j in range(tokens) if j // block == i // block]
        cosine = {j: float(torch.cosine_similarity(keys[i], keys[j], dim=0)) for j in peers if j != i}
        similar = [j for j in cosine if cosine[j] > threshold]
        for j in cosine:
            if not similar or j != max(similar):
                total[j] += cosine[j] / len(peers)
    return total.softmax(dim=0)


@pytest.mark.parametrize("group", ["max", "mean"])
@pytest.mark.parametrize(("similarity", "block"), [("full", 16), ("block", 4), ("block", 20)])
@pytest.mark.parametrize("kernel", [1, 7])
def test_r_kv_equals_the_loop(kernel, similarity, block, group):
    view = layer_view(layer_facts(), None, num_tokens=14)
    policy = RKV(
        weight=0.3, window=3, kernel=kernel, group=group, similarity=similarity, block=block, threshold=0.2
    )
    rows = attention_rows(view, view.signals.queries, view.logical_len - 3)
    rows = rows.view(2, 2, 3, 14)
    importance = (rows.amax(1) if group == "max" else rows.mean(1)).mean(dim=1)[:, :11]
    half = kernel // 2
    pooled = torch.stack([importance[:, max(0, j - half) : j + half + 1].amax(1) for j in range(11)], dim=1)
    within = 14 if similarity == "full" else block
    repeated = torch.stack([redundancy(keys.double(), 0.2, within) for keys in view.keys])
    expected = 0.3 * pooled - 0.7 * repeated[:, :11]
    scores = policy.score(view)
    torch.testing.assert_close(scores[:, :11].double(), expected, rtol=1e-5, atol=1e-6)
    assert scores[:, 11:].tolist() == [[2.0, 3.0, 4.0]] * 2


def test_repeated_tokens_go_first_and_the_newest_copy_stays():
    facts = model_facts(1)
    keys = 2 * torch.eye(40).repeat(2, 1, 1)
    keys[:, [5, 12, 20]] = keys[:, [28]]
    signals = LayerSignals(queries=torch.zeros(4, 8, 40))
    config = CompressionConfig("r_kv", budget=37, sinks=0, recent=8)
    kept = Compressor(config, facts).choose(
        lambda _: DenseSource(keys, keys), 40, 40, 40, signals=lambda _: signals
    )
    for row in kept[0].tolist():
        assert set(range(40)) - set(row) == {5, 12, 20}


def test_bands_of_rows_give_the_same(monkeypatch):
    view = layer_view(layer_facts(), None, num_tokens=14)
    whole = RKV(window=3).score(view)
    monkeypatch.setattr(r_kv, "MAX_LOGITS", 3 * 2 * 14)
    torch.testing.assert_close(RKV(window=3).score(view), whole)


def test_zero_keys_are_similar_to_nothing():
    view = layer_view(layer_facts(), None)
    keys = view.keys.clone()
    keys[:, 2] = 0
    assert RKV(window=3).score(with_kv(view, keys)).isfinite().all()
    assert summed_similarity(torch.zeros(1, 3, 4), 0.0).tolist() == [[0.0, 0.0, 0.0]]


def test_defaults_are_the_published_ones():
    policy = RKV()
    assert (policy.weight, policy.window, policy.kernel, policy.threshold) == (0.1, 8, 7, 0.5)
    assert (policy.query_window, policy.similarity) == (8, "full")
    assert dataclasses.replace(policy, window=3).query_window == 3
