"""R-KV against loops, and what it is for: of keys that say the same the newest stays."""

import dataclasses

import pytest
import torch
from compression_oracles import attention_rows, layer_facts, layer_view, model_facts, with_kv

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies import r_kv
from kvreclaim.compression.policies.r_kv import RKV, summed_similarity
from kvreclaim.compression.policy import LayerSignals
from kvreclaim.ops.key_source import DenseSource


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
def test_equals_the_loop(kernel, similarity, block, group):
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
