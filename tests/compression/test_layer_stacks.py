"""Stacks of any size, over layers of several kinds, choose what layers alone choose."""

from __future__ import annotations

import pytest
import torch

from kvreclaim.compression import layer_stacks
from kvreclaim.compression.compressor import Compressor, PassQuestion
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.testing import toys

OF_LAYER = 4 * 40 * 2 * (8 + 8)
"""Bytes that one of the toy's layers counts."""


@pytest.mark.parametrize("windows", [(None,) * 5, (None, 30, None, 30, None)], ids=["one kind", "two kinds"])
@pytest.mark.parametrize(
    "policy", ["triattention", "query_mixture", "expected_attention", "surrogate", "snapkv"]
)
@pytest.mark.parametrize(("most", "widths"), [(1, {1}), (3 * OF_LAYER, {1, 2}), (1 << 28, {2, 3, 5})])
def test_stacks_of_any_size(most, widths, policy, windows, monkeypatch) -> None:
    monkeypatch.setattr(layer_stacks, "MAX_BYTES", most)
    facts = toys.model_facts(windows=windows)
    compressor = Compressor(
        CompressionConfig(policy, budget=12, sinks=1, recent=2, mode="per_layer_head"),
        facts,
        toys.query_stats(facts),
    )
    sizes = []

    def source(*layers: int) -> DenseSource:
        sizes.append(len(layers))
        keys, values = (torch.cat([toys.noise(n + seed, 2, 40, 8) for n in layers]) for seed in (0, 9))
        return DenseSource(keys, values)

    def kept(stack) -> torch.Tensor:
        def signals(layer: int):
            return toys.layer_signals(facts.layers[layer], 40, 60, seed=10 * layer)

        question = PassQuestion(source, 40, 4, 60, signals=signals, first=False, stack=stack)
        return compressor.choose_all([question])[0]

    alone = kept(None)
    sizes.clear()
    assert torch.equal(kept(lambda layers: source(*layers)), alone)
    assert set(sizes) <= widths
    assert sum(sizes) == 5
    if most > 1:
        assert max(sizes) > 1
