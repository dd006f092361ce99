"""KeyDiff against the published example and a loop."""

import dataclasses

import torch
from compression_oracles import layer_facts, layer_view, model_facts, with_kv

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.keydiff import KeyDiff
from kvreclaim.ops.key_source import DenseSource


def test_keeps_the_two_keys_that_differ():
    keys = torch.tensor([[[2.0, 0.0], [2.0, 0.2], [0.0, 3.0], [1.8, 0.1]]])
    facts = dataclasses.replace(model_facts(1), layers=(dataclasses.replace(layer_facts(), num_kv_heads=1),))
    compressor = Compressor(CompressionConfig("keydiff", budget=2, sinks=0, recent=0), facts)
    kept = compressor.choose(lambda _: DenseSource(keys, keys), 4, 0, 4)
    assert kept.tolist() == [[[0, 2]]]


def test_is_the_negated_cosine_to_the_mean_direction():
    view = layer_view(layer_facts(), None, num_tokens=30)
    keys = view.keys.double()
    for head in range(2):
        directions = [key / key.norm() for key in keys[head]]
        anchor = sum(directions) / len(directions)
        expected = [-float(key @ anchor / key.norm() / anchor.norm()) for key in keys[head]]
        torch.testing.assert_close(KeyDiff().score(view)[head], torch.tensor(expected), atol=1e-6, rtol=0)


def test_does_not_see_the_length_of_a_key():
    view = layer_view(layer_facts(), None)
    longer = with_kv(view, keys=view.keys * torch.arange(1.0, 10.0)[:, None])
    torch.testing.assert_close(KeyDiff().score(longer), KeyDiff().score(view))
