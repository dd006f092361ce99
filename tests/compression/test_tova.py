"""TOVA keeps what the last query attends to, for all heads alike."""

import dataclasses

import torch
from compression_oracles import attention_rows, layer_facts, layer_view, model_facts, noise

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.tova import TOVA
from kvreclaim.compression.policy import LayerSignals
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
