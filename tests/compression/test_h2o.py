"""H2O keeps what has received most attention."""

import dataclasses

import torch
from compression_oracles import layer_facts, layer_view, model_facts, noise

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.h2o import H2O
from kvreclaim.compression.policy import LayerSignals, Mode, Signal
from kvreclaim.ops.key_source import DenseSource

ROWS = [
    [1.0],
    [0.7, 0.3],
    [0.5, 0.1, 0.4],
    [0.4, 0.1, 0.3, 0.2],
    [0.3, 0.05, 0.4, 0.05, 0.2],
    [0.25, 0.05, 0.35, 0.05, 0.1, 0.2],
]


def test_the_published_example():
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
