"""Captured queries are the ones that the model's own modules put out before rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from paged_batch import paged
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.capture import capture_queries
from kvreclaim.model.loader import LoadedModel, load_model
from kvreclaim.offload.store.namespace import weights_digest
from kvreclaim.ops import reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.kv_cache import KVCache

DOCUMENTS = tiny.prompts((30, 1, 17), seed=6)
EVERY_FAMILY = pytest.mark.parametrize("family", tiny.FAMILIES + tiny.SCALED)


def capture(directory, documents) -> list[torch.Tensor]:
    """Per layer [H, T, D], in the order of the calls."""
    loaded = load_model(directory, dtype="float32", device="cpu")
    queries: list[torch.Tensor] = []

    def on_queries(layer: int, q: torch.Tensor) -> None:
        assert layer == len(queries)
        queries.append(q)

    capture_queries(loaded, documents, on_queries)
    assert len(queries) == loaded.facts.num_layers
    return queries


@EVERY_FAMILY
def test_queries_are_those_before_rotation(family, tiny_dir) -> None:
    """Several documents at once, each of which sees itself only."""
    want = tiny.queries_before_rope(tiny_dir(family), DOCUMENTS)
    for got, expected in zip(capture(tiny_dir(family), DOCUMENTS), want, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_a_documents_queries_do_not_depend_on_the_others(tiny_dir) -> None:
    together = capture(tiny_dir("gemma2"), DOCUMENTS)
    alone = capture(tiny_dir("gemma2"), DOCUMENTS[2:])
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a[:, -17:], b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("documents", [[], [[]], [[5, 6], []]])
def test_an_empty_document_is_refused(documents, tiny_dir) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one token"):
        capture(tiny_dir("llama"), documents)


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
        ({"scale": 0.5}, r"has scale 0\.5, .* scale 0\.25, "),
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


def digest(loaded: LoadedModel, num_threads: int = 1) -> str:
    model = loaded.model
    return weights_digest([*model.named_parameters(), *model.named_buffers()], num_threads)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_kernels_and_threads_change_no_digest(tiny_dir: Callable[[str], Path], name: str) -> None:
    native, plain = (load_model(tiny_dir(name), device="cpu", kernels=k) for k in ("native", "torch"))
    assert digest(native) == digest(plain, num_threads=3)
    assert digest(native) != digest(load_model(tiny_dir(name), device="cpu", dtype="bfloat16"))


@torch.no_grad()
def test_one_number_of_any_tensor_changes_it(tiny_dir: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_dir("llama"), device="cpu")
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    seen = {digest(loaded)}
    for tensor in tensors:
        last = tensor.view(-1)[-1:].view(torch.uint8)
        last[0] ^= 1
        seen.add(digest(loaded))
        last[0] ^= 1
    assert len(seen) == 1 + len(tensors)
