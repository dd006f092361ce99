"""A wrong option of a policy, and a policy that does not go with the model, is one sentence; docs/policies.md
names every policy, its options and their source."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.refusals import check_policy
from kvreclaim.compression.registry import make_policy, policy_class, policy_names
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import LayerFacts, ModelFacts, Softmax
from kvreclaim.ops.rope import RopeLayout
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

WRONG = {
    "ada_kv": [({"alpha": alpha}, "'alpha'") for alpha in (-0.1, 1.1, True, "0.2")],
    "expected_attention": [
        ({"horizon": 0}, "'horizon' is 0"),
        ({"horizon": 1 << 17}, "'horizon' is 131072; it must be an integer <= 65536"),
        ({"covariance": 1}, "'covariance' is 1; .*true or false"),
        ({"value_norm": "no"}, "'value_norm' is 'no'; .*true or false"),
        ({"group": "sum"}, "'group' is 'sum'; it must be one of mean, max"),
    ],
    "lagkv": [({"lag": 0}, "'lag' is 0"), ({"cross": 1}, "'cross' is 1")],
    "oracle": [
        ({"aggregate": "mean"}, "'aggregate' is 'mean'; it must be one of max, sum"),
        ({"horizon": 0}, "'horizon' is 0; .* or null for all"),
    ],
    "protect": [
        ({"first": -1}, "'first' is -1"),
        ({"last": 2.5}, "'last' is 2.5"),
        ({"spans": (3, 5)}, "'spans' is 3; it must be a pair"),
        ({"spans": 3}, "'spans' is 3"),
        ({"spans": ((5, 3),)}, r"'spans' is \(5, 3\)"),
        ({"spans": ((1, 2, 3),)}, r"'spans' is \(1, 2, 3\)"),
        ({"spans": ("12",)}, "'spans' is '12'"),
    ],
    "pyramidkv": [({"beta": beta}, "'beta'") for beta in (0.5, 0, True, "20")],
    "query_mixture": [
        ({"form": "cheap"}, "'form'"),
        ({"temperature": 0}, "'temperature'"),
        ({"temperature": "hot"}, "'temperature'"),
        ({"offsets": ()}, "'offsets'"),
        ({"value_norm": 1}, "'value_norm'"),
    ],
    "r_kv": [
        ({"weight": 1.1}, "'weight' is 1.1; it must be a number from 0 to 1"),
        ({"window": 0}, "'window'"),
        ({"kernel": 2}, "'kernel' is 2; it must be odd"),
        ({"threshold": -1}, "'threshold'"),
        ({"group": "sum"}, "'group' is 'sum'; it must be one of mean, max"),
        ({"similarity": "local"}, "'similarity' is 'local'; it must be one of full, block"),
        ({"block": 1}, "'block' is 1; it must be an integer >= 2"),
        ({"block": 10**9}, "'block' is 1000000000; it must be an integer <= 1024"),
        ({"window": 10**9}, "'window' is 1000000000; it must be an integer <= 1024"),
    ],
    "random": [({"seed": seed}, "'seed'") for seed in (-1, 1.5, True, "1")],
    "segments": [({"n": 0}, "'n' is 0"), ({"share": 1.5}, "'share' is 1.5"), ({"n": 2.0}, "'n' is 2.0")],
    "snapkv": [
        ({"window": 0}, "'window' is 0; it must be an integer >= 1"),
        ({"window": 1025}, "'window' is 1025; it must be an integer <= 1024"),
        ({"kernel": 4}, "'kernel' is 4; it must be odd"),
        ({"kernel": 1025}, "'kernel' is 1025; it must be an integer <= 1023"),
        ({"kernel": 0}, "'kernel' is 0"),
        ({"kernel": 5.0}, "'kernel' is 5.0"),
        ({"pooling": "mean"}, "'pooling' is 'mean'; it must be one of average, max"),
        ({"when": "decode"}, "'when' is 'decode'; it must be one of prefill, always"),
        ({"group": "sum"}, "'group' is 'sum'; it must be one of mean, max"),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "message"), [(name, *row) for name, rows in WRONG.items() for row in rows]
)
def test_a_wrong_option_is_named(name, options, message):
    policy = make_policy(name)
    wrapped = {"inner": policy.inner} if hasattr(policy, "inner") else {}
    with pytest.raises(InvalidArgumentError, match=f"{name} option {message}"):
        type(policy)(**wrapped, **options)


LAYER = LayerFacts(4, 2, 8, 8, Softmax(0.5), rope=RopeLayout(torch.ones(4)))
FACTS = ModelFacts("toy", "f", (LAYER, LAYER), torch.float32, torch.device("cpu"), 512)
WINDOWED = replace(FACTS, layers=(LAYER, replace(LAYER, softmax=Softmax(0.5, window=8))))
UNKNOWN = replace(FACTS, layers=(LAYER, replace(LAYER, rope=None)))


class Odd(Knorm):
    """Knorm with the traits that a test gives it."""

    name = "odd"


def odd(**traits):
    return type("Odd", (Odd,), traits)()


@pytest.mark.parametrize(
    "policy", ["knorm", "paged_eviction", "quest", "pyramidkv", "ada_kv", "streaming_llm(positions=cache)"]
)
def test_a_plain_model_has_all(policy):
    check_policy(make_policy(policy), FACTS)


@pytest.mark.parametrize(
    ("policy", "facts", "message"),
    [
        ("quest", WINDOWED, "quest reads some blocks per head.*layer 1 of 'toy' is one"),
        ("ada_kv", WINDOWED, "ada_kv keeps unequal numbers of tokens per head.*layer 1 of 'toy' is one"),
        ("streaming_llm(positions=cache)", UNKNOWN, "needs the rotation of 'toy'.*no rotation.*layer 1"),
    ],
)
def test_what_the_model_cannot_serve(policy, facts, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check_policy(make_policy(policy), facts)


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        (
            {"eviction_method": EvictionMethod.CELLS, "needs": frozenset({Signal.ATTENTION_MASS})},
            "attention mass needs equal ones",
        ),
        ({"eviction_method": EvictionMethod.CELLS, "cache_relative": True}, "slot for its position"),
        ({"eviction_method": EvictionMethod.BLOCKS, "cache_relative": True}, "slot for its position"),
    ],
)
def test_contradictions(traits, message):
    with pytest.raises(InvalidArgumentError, match=message):
        check_policy(odd(**traits), FACTS)


def test_the_message_is_one_sentence_that_names_a_way_out():
    with pytest.raises(InvalidArgumentError) as caught:
        check_policy(make_policy("quest"), WINDOWED)
    assert str(caught.value).endswith("disable_hybrid_kv_cache_manager and kv_offloading_size.")


PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
LINES = "".join(PAGE.split(f"## {title}\n")[1].split("\n## ")[0] for title in ("All policies", "Wrappers"))
ROWS = {match[1]: match[0] for match in re.finditer(r"^\| `([\w-]+)[`(].*$", LINES, re.MULTILINE)}
NEEDS = {
    Signal.QUERY_STATS: "statistics",
    Signal.QUERY_CENTERS: "with centres",
    Signal.QUERY_COVARIANCE: "with covariance",
    Signal.SURROGATE: "with a surrogate",
    Signal.RECENT_QUERIES: "recent queries",
    Signal.ATTENTION_MASS: "attention mass",
    Signal.POSITIONS: "logical positions",
    Signal.FUTURE_QUERIES: "future queries",
    Signal.TOKEN_SCORES: "weights of hidden states",
    Signal.READ_AGAIN: "the prompt read again",
}
BUILT_IN = [name for name in policy_names() if policy_class(name).__module__.startswith("kvreclaim.")]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_policy_has_its_row(name):
    policy, row = make_policy(name), ROWS[name]
    options = [field.name for field in fields(policy) if field.name != "inner"]
    assert all(f"`{option}`" in row for option in options)
    paper = re.findall(r"Paper: arXiv (\d{4}\.\d{5})", type(policy).__doc__)
    assert re.findall(r"\b\d{4}\.\d{5}\b", row) == paper
    if hasattr(policy, "inner"):
        assert f"| {policy.inner.name} |" in row
    else:
        assert f"| {policy.default_mode.value} |" in row
        assert {s for s, words in NEEDS.items() if words in row} >= policy.needs


def test_its_example_runs(capsys):
    exec(compile(PAGE.split("```python\n")[1].split("```")[0], "docs/policies.md", "exec"), {})
    assert capsys.readouterr().out == "segments(query_mixture(value_norm=false), n=4)\n"


def test_the_page_names_no_other():
    assert set(ROWS) == set(BUILT_IN)
