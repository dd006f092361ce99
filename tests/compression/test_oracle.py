"""The oracle keeps what will be asked for."""

import dataclasses

import pytest
import torch
from compression_oracles import attention_rows, layer_facts, layer_view, model_facts, noise

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies import oracle
from kvreclaim.compression.policies.oracle import Oracle
from kvreclaim.compression.policy import LayerSignals
from kvreclaim.ops.key_source import DenseSource


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("horizon", [None, 2, 99])
@pytest.mark.parametrize("aggregate", ["max", "sum"])
def test_equals_the_loop(aggregate, horizon, window):
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


def test_keeps_the_token_that_is_asked_for_once():
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
