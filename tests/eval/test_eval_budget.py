"""Budgets are equal in bytes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.budget import KVFormat, kv_format
from kvreclaim.ops.facts import LayerFacts, ModelFacts

LAYER = LayerFacts(num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, scale=0.25)
FACTS = ModelFacts("m", "f", (LAYER, LAYER), torch.bfloat16, torch.device("cpu"), 4096)


def test_a_share_of_the_bytes_is_that_share_of_the_tokens_in_the_own_dtype():
    kv = kv_format("auto", FACTS)
    assert kv.token_bytes == kv.reference_bytes == 2 * 2 * (16 + 16) * 2
    assert kv.budget_tokens(0.25, 2000, 1) == 500
    assert kv.budget_tokens(0.25, 2000, 16) == 496
    assert kv.budget_tokens(0.29, 100, 1) == 29  # 0.29 * 100 is 28.999... in floating point
    assert kv.budget_tokens(1.0, 37, 1) == 37
    assert kv_format("bfloat16", FACTS) == kv


def test_a_smaller_format_gets_more_tokens():
    kv = kv_format("auto", FACTS)
    assert replace(kv, token_bytes=kv.reference_bytes // 4).budget_tokens(0.25, 2000, 16) == 2000


@given(
    num_tokens=st.integers(1, 10_000),
    token_bytes=st.integers(1, 4096),
    reference=st.integers(1, 4096),
    fraction=st.sampled_from([0.1, 0.25, 0.3, 1.0]),
    block_size=st.sampled_from([1, 16, 32]),
)
def test_the_bytes_are_never_exceeded_and_a_block_more_would(
    num_tokens, token_bytes, reference, fraction, block_size
):
    budget = KVFormat("x", token_bytes, reference).budget_tokens(fraction, num_tokens, block_size)
    allowed = Fraction(str(fraction)) * num_tokens * reference
    assert budget % block_size == 0
    assert budget * token_bytes <= allowed < (budget + block_size) * token_bytes


def test_another_format_is_refused_with_what_there_is():
    with pytest.raises(InvalidArgumentError, match=r"'int4'.*bfloat16.*pass auto or bfloat16"):
        kv_format("int4", FACTS)
