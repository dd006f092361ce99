"""A layer attends as it was found when the model was probed, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_batch import paged
from torch import Tensor

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops import reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.kv_cache import KVCache

PROBED = Softmax(0.25, softcap=2.0, window=7, sinks=torch.zeros(4))


def cache_of(softmax: Softmax) -> KVCache:
    return reference.allocate((LayerFacts(4, 2, 8, 8, softmax),), 2, 4, like=torch.empty(0))


def call_of(softmax: Softmax) -> AttentionCall:
    q, kv = torch.ones(1, 4, 8), torch.ones(1, 2, 8)
    return AttentionCall(0, q, kv, kv, softmax)


@pytest.mark.parametrize("sinks", [torch.zeros(4), torch.ones(4).bfloat16()], ids=["same", "weights"])
def test_a_layer_that_asks_as_it_did_has_its_place(sinks: Tensor) -> None:
    cache = cache_of(PROBED)
    assert call_of(replace(PROBED, sinks=sinks)).served_by(cache.layers[0]) is cache.layers[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": 0.5}, r"asks for scale 0\.5, .* scale 0\.25, "),
        ({"softcap": None}, "softcap None, .* softcap 2.0, "),
        ({"window": 8}, "window 8, .* window 7, "),
        ({"sinks": None}, "no sinks, .* 7, sinks "),
    ],
    ids=["scale", "softcap", "window", "sinks"],
)
def test_a_layer_that_changed_is_refused_before_anything_is_written(change: dict, words: str) -> None:
    cache = cache_of(PROBED)
    slots = SequenceSlots(torch.tensor([1], dtype=torch.int32).numpy(), 1, 1)
    batch = AttentionBatch.build((slots,), 4, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match=words):
        paged(reference, cache, batch).attend(call_of(replace(PROBED, **change)))
    assert not cache.k.any()
