"""Requests before the first real one compress as the engine's own do."""

from __future__ import annotations

import logging

import pytest

from kvreclaim import LLM, CompressionConfig, demo_model
from kvreclaim.engine.api.model_engine import ModelEngine
from kvreclaim.engine.api.warm_up import warm_up


@pytest.mark.parametrize(("budget", "recent"), [(2048, 32), ("50%", 32), (200, 128)])
def test_a_warm_up_compresses_by_the_models_best_policy(budget, recent, caplog) -> None:
    """It does under a share of the bytes, and where half of its prompt is less than what always stays."""
    llm = LLM(demo_model(), num_blocks=64, max_num_batched_tokens=256)
    made = []

    def make(config):
        made.append(ModelEngine(llm.loaded, llm.stats_file, config, None, warms_up=False))
        return made[-1]

    config = CompressionConfig("auto", budget=budget, recent=recent)
    with caplog.at_level(logging.WARNING, "kvreclaim.engine.api.warm_up"):
        warm_up(make, llm.engine.config, config, llm.loaded)
    assert not [line for line in caplog.records if line.name == "kvreclaim.engine.api.warm_up"]
    assert made[0].engine.totals.compactions > 0
    assert made[0].engine.totals.generation_tokens == 16
