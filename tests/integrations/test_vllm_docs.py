"""docs/vllm.md agrees with the plugin's code: fields, policies, refusals, metrics."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvreclaim.compression.registry import make_policy, policy_names
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.refusals.loaded import BACKENDS
from kvreclaim.integrations.vllm.refusals.predicates import CACHE_DTYPES
from kvreclaim.integrations.vllm.refusals.table import CONFIG
from kvreclaim.integrations.vllm.settings import options
from kvreclaim.integrations.vllm.settings import page_address as address
from kvreclaim.integrations.vllm.settings.family import FAMILIES
from kvreclaim.integrations.vllm.v0_32.front_side import COUNTERS

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
HEADINGS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def names(text: str) -> set[str]:
    """The names in backticks in the first cell of each row of a table."""
    rows = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_field_is_in_the_table():
    known = {field.name for kind in (options.Options, options.CompressionConfig) for field in fields(kind)}
    derived = {"settings", "page", "budget_share", "policy_object", "density"}
    assert names(HEADINGS["Options"]) == known - derived | set(address.FIELDS)


def is_admitted(name: str) -> bool:
    """A wrapper as it is around a policy that is admitted itself."""
    try:
        policy = make_policy(name)
    except InvalidArgumentError:
        policy = make_policy(f"{name}(knorm)")
    try:
        options.check_policy(policy)
    except InvalidArgumentError:
        return False
    return True


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_is_admitted_or_refused_as_the_page_says(name):
    (row,) = re.findall(r"^\| `policy` \|.*$", PAGE, re.MULTILINE)
    refused = "".join(re.findall(r"^\| policies: .*$", HEADINGS["What is refused, and why"], re.MULTILINE))
    assert (f"`{name}`" in row) is is_admitted(name)
    assert (f"`{name}`" in refused) is not is_admitted(name)


def test_every_option_that_is_to_be_removed_is_among_the_refused():
    flags = {flag for row in CONFIG for flag in re.findall(r"remove (--[a-z-]+)", row.remedy)}
    assert flags
    assert flags <= names(HEADINGS["What is refused, and why"])


def test_every_cache_dtype_and_back_end_is_named():
    table = HEADINGS["What composes with what"]
    assert all(f"`{dtype}`" in table for dtype in CACHE_DTYPES)
    assert len(BACKENDS) == 5
    assert re.search(r"attention back-ends \| CPU .* FlashAttention, FlashInfer, Triton; TurboQuant", table)


def test_every_metric_is_in_the_table():
    assert names(HEADINGS["Metrics"]) == {f"{name}_total" for name, _ in COUNTERS.values()}


def test_the_versions_are_the_families():
    (versions,) = re.findall(r"Supported: \*\*(.*?)\*\*", PAGE)
    assert versions == ", ".join(FAMILIES)
