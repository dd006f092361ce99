"""SnapKV against loops, and its pooling against the published numbers."""

import dataclasses

import pytest
import torch
from compression_oracles import attention_rows, layer_facts, layer_view, model_facts, noise

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.snapkv import SnapKV, pool
from kvreclaim.compression.policy import LayerSignals
from kvreclaim.ops.key_source import DenseSource

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
