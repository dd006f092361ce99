"""docs/policies.md names every policy, its options and their source."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvreclaim.compression.policy import Signal
from kvreclaim.compression.registry import make_policy, policy_class, policy_names

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
