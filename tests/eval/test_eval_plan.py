"""What is compared is checked before anything runs."""

from __future__ import annotations

import pytest

from kvreclaim.cli.config_options import names_in
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.plan import EvalPlan, GridColumn


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
