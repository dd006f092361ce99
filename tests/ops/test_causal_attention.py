"""A document attends to itself as a sequence of the paged cache would."""

from __future__ import annotations

import pytest
import torch
from paged_oracle import ALL_HOW, DTYPES, Ask, Shape, World, assert_equal, expected, world

from kvreclaim.ops import reference
from kvreclaim.ops.facts import Softmax
from kvreclaim.ops.reference import causal_attention


def attend(w: World, **how) -> torch.Tensor:
    k, v = (x[0][0].transpose(0, 1) for x in (w.keys, w.values))
    return causal_attention(w.q[0], k, v, Softmax(**{"scale": w.shape.dim**-0.5, **how}))


@DTYPES
@ALL_HOW
@pytest.mark.parametrize("length", [1, 2, 33])
def test_equals_attention_written_out(how: dict, length: int, dtype: torch.dtype) -> None:
    w = world(Shape(v_dim=24, dtype=dtype), [Ask(length, length)])
    out = attend(w, **how)
    assert out.dtype == dtype
    assert_equal(out, expected(w, **how))


@ALL_HOW
@pytest.mark.parametrize("num_scores", [1, 500, 1320])
def test_cutting_long_documents_changes_nothing(how: dict, num_scores: int, monkeypatch) -> None:
    w = world(Shape(), [Ask(33, 33)])
    monkeypatch.setattr(reference.attention, "MAX_SCORES", num_scores)
    assert_equal(attend(w, **how), expected(w, **how))
