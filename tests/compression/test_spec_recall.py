"""How recall is written, what it asks of the budget, and where chunks are cut."""

from __future__ import annotations

import pytest

from kvreclaim.compression.spec.recall import parse_recall
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.budget.account import EvictionCounters
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.footprint import Footprint, check_blocks
from kvreclaim.schedule.budget.recall import Recall


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("pass", Recall()),
        ("tokens:8", Recall("tokens", 8)),
        ("tokens:8(blocks=2)", Recall("tokens", 8, 2)),
        ("tokens(every=3)", Recall("tokens", 3)),
        ("query", Recall("query", 1)),
        ("query(blocks=8, packing=pca, digest=centroid)", Recall("query", 1, 8, "pca", "centroid")),
    ],
)
def test_read(text, wanted):
    assert parse_recall(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "never",
        "tokens:",
        "tokens:x",
        "tokens:0",
        "tokens:4(every=4)",
        "query(every=2)",
        "pass(every=3)",
        "query(8)",
        "query(blocks=0)",
        "query(blocks=2, blocks=3)",
        "query(packing=best)",
        "query(window=3)",
        3,
        True,
    ],
)
def test_refused(text):
    with pytest.raises(InvalidArgumentError, match="recall"):
        parse_recall(text)


def footprint(recall, **fields):
    recall += "(blocks=4)"
    given = {"budget": 96, "interval": 64, "recent": 8, "sinks": 2, **fields}
    return Footprint(EvictionMethod.COMPACT, recall=parse_recall(recall), **given)


def test_chunks_behind_the_prompt_end_where_pages_are_chosen():
    account = EvictionCounters(num_evicted=100)
    every = footprint("tokens:8")
    assert [every.tokens_until_pass(n, 150, account) for n in (160, 161, 167)] == [8, 7, 1]
    assert footprint("query").tokens_until_pass(161, 150, account) == 1
    assert footprint("pass").tokens_until_pass(190, 150, account) == 70
    assert footprint("query").tokens_until_pass(120, 100, EvictionCounters()) == 40, "nothing evicted"
    assert footprint("query").tokens_until_pass(120, 150, account) == 30, "inside the prompt"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"budget": 90}, "make it a multiple, such as 80"),
        ({"budget": 64}, "raise it above 74"),
        ({"interval": 63}, "raise it to 64"),
        ({"recent": 70, "budget": 160}, "raise it to 70"),
    ],
)
def test_what_the_budget_must_be(fields, words):
    check_blocks(footprint("pass"), "knorm")
    with pytest.raises(InvalidArgumentError, match=words):
        check_blocks(footprint("pass", **fields), "knorm")
