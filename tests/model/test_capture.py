"""Captured queries are the ones that the model's own modules put out before rotation."""

from __future__ import annotations

import pytest
import tiny
import torch

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.capture import capture_queries
from kvreclaim.model.loader import load_model

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
