"""Plans of comparisons are checked before anything runs."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.cli.config_options import names_in
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.budget import FormatStorage
from kvreclaim.eval.plan import EvalPlan, GridColumn
from kvreclaim.ops.facts import LayerFacts, ModelFacts, Softmax


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("full,knorm", ["full", "knorm"]),
        (" a , b(c,d(e,f)),g ", ["a", "b(c,d(e,f))", "g"]),
        ("knorm(keep=large),,full", ["knorm(keep=large)", "full"]),
        ("", []),
    ],
)
def test_a_list_is_split_outside_parentheses(text, parts):
    assert names_in(text) == parts


@pytest.mark.parametrize("text", ["a(b,c", "a)b(", "a(b)),c"])
def test_parentheses_must_match(text):
    with pytest.raises(InvalidArgumentError, match="parentheses"):
        names_in(text)


def test_the_full_cache_is_run_once_whatever_the_budgets():
    plan = EvalPlan(policies=["full", "knorm"], budgets=[0.5, 0.25, 0.5])
    assert plan.settings() == [
        GridColumn("full", 1.0, "auto"),
        GridColumn("knorm", 0.5, "auto"),
        GridColumn("knorm", 0.25, "auto"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": ["nope"]}, "nope"),
        ({"policies": "full"}, "non-empty list"),
        ({"policies": []}, "non-empty list"),
        ({"budgets": [0.0]}, "above 0"),
        ({"budgets": [1.5]}, "1.5"),
        ({"budgets": [-0.1]}, "-0.1"),
        ({"budgets": [True]}, "True"),
        ({"budgets": [float("inf")]}, "inf"),
        ({"budgets": [256.5]}, "256.5"),
        ({"budgets": [0.5, 256]}, "shares .up to 1. or tokens .from 2., not both"),
        ({"budgets": [64]}, "64 tokens, but sinks . recent = 68 are always kept"),
        ({"seeds": [-1]}, "-1"),
        ({"num_examples": 0}, "num_examples"),
        ({"batch_size": 0}, "batch_size"),
        ({"interval": 0}, "interval"),
        ({"recent": -1}, "recent"),
        ({"mode": "some"}, "mode"),
    ],
)
def test_a_wrong_value_is_refused_by_name(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        EvalPlan(**arguments)


def test_a_budget_below_the_protected_tokens_is_refused_where_it_arises():
    plan = EvalPlan(policies=["knorm"], budgets=[0.1], recent=64)
    with pytest.raises(InvalidArgumentError, match="always kept"):
        plan.compression(plan.settings()[0], 60, None)
    with pytest.raises(InvalidArgumentError, match="less than one block"):
        plan.compression(plan.settings()[0], 0, None)
    assert plan.compression(plan.settings()[0], 200, None).budget == 200


LAYER = LayerFacts(num_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=32, softmax=Softmax(0.25))
FACTS = ModelFacts("m", "f", (LAYER, LAYER), torch.bfloat16, torch.device("cpu"), 4096)
UNITS = 2 * 2  # layers, KV heads


def test_a_share_of_the_bytes_is_that_share_of_the_tokens_in_the_own_dtype():
    kv = FormatStorage.of("auto", FACTS, 16)
    assert kv.token_bytes == kv.reference_bytes == UNITS * (32 + 32) * 2
    assert kv.budget_tokens(0.25, 2000) == 496
    token = FormatStorage.of("auto", FACTS, 1)
    assert token.budget_tokens(0.25, 2000) == 500
    assert token.budget_tokens(0.29, 100) == 29  # 0.29 * 100 is 28.999... in floating point
    assert token.budget_tokens(1.0, 37) == 37
    assert FormatStorage.of("bf16", FACTS, 16) == FormatStorage.of("bfloat16", FACTS, 16) == kv


@pytest.mark.parametrize(
    ("name", "unit_bytes", "tokens"),
    [
        ("fp32", 4096, 240),
        ("bf16", 2048, 496),
        ("int8", 16 * 64 + 48, 944),
        ("fp8", 16 * 64 + 48, 944),
        ("int4", 16 * 32 + 64, 1776),
        ("turboquant4", 16 * 32 + 48, 1824),
    ],
)
def test_a_smaller_format_gets_more_tokens(name, unit_bytes, tokens):
    """2,000 tokens of 512 bytes: a quarter of them is 256,000 bytes."""
    kv = FormatStorage.of(name, FACTS, 16)
    assert kv.block_bytes == UNITS * unit_bytes
    assert kv.budget_tokens(0.25, 2000) == tokens == 256_000 // (UNITS * unit_bytes) * 16


@given(
    num_tokens=st.integers(1, 10_000),
    block_bytes=st.integers(1, 4096),
    reference=st.integers(1, 4096),
    fraction=st.sampled_from([0.1, 0.25, 0.3, 1.0]),
    block_size=st.sampled_from([1, 16, 32]),
)
def test_the_bytes_are_never_exceeded_and_a_block_more_would(
    num_tokens, block_bytes, reference, fraction, block_size
):
    kv = FormatStorage("x", block_size, block_bytes, reference)
    budget = kv.budget_tokens(fraction, num_tokens)
    allowed = Fraction(str(fraction)) * num_tokens * reference
    blocks = budget // block_size
    assert budget % block_size == 0
    assert blocks * block_bytes <= allowed
    assert allowed < (blocks + 1) * block_bytes


@pytest.mark.parametrize(("name", "least"), [("int8", 0.53), ("int4", 0.2813), ("turboquant4", 0.2735)])
def test_a_format_alone_meets_the_budgets_that_it_fits_into(name, least):
    kv = FormatStorage.of(name, FACTS, 16)
    assert kv.meets(least)
    assert kv.meets(1.0)
    assert not kv.meets(0.98 * least)


@pytest.mark.parametrize("name", ["auto", "bf16", "fp16", "fp32"])
def test_a_format_that_saves_nothing_never_does(name):
    assert not FormatStorage.of(name, FACTS, 16).meets(1.0)


def test_an_unknown_format_is_refused_with_what_there_is():
    with pytest.raises(InvalidArgumentError, match=r"'int3'.*bf16.*int8.*turboquant4"):
        FormatStorage.of("int3", FACTS, 16)
