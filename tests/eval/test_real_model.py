"""A small part of docs/evidence.md on the language model itself: which heads get the memory decides. Fixed
documents and no sampling; what is asserted has several times the room that other machines need."""

from __future__ import annotations

import pytest

from kvreclaim import LLM
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.corpora import prose
from kvreclaim.eval import TaskOptions, evaluate

PIECE = 768


@pytest.fixture(scope="module")
def llm(real_dir):
    return LLM(real_dir, device="cpu", num_blocks=400, max_num_batched_tokens=2048)


@pytest.fixture(scope="module")
def stats(llm):
    tokens = llm.tokenizer.encode(prose().calibration)
    pieces = [tokens[start : start + PIECE] for start in (0, len(tokens) // 2)]
    return calibrate(llm.loaded, pieces, num_centers=0, surrogate=len(pieces))


@pytest.fixture(scope="module")
def needles(llm, stats):
    """policy -> its row: 64 to 96 digits, a fifth of the tokens, a pass behind the prompt and one while the
    answers are computed."""
    policies = [
        "full",
        "shares(surrogate)",
        "shares(random, by=static)",
        "surrogate",
    ]
    options = TaskOptions(num_tokens=1280)
    report = evaluate(llm, policies, [0.2], ["needles"], options=options, num_examples=2, stats=stats)
    assert {row.status for row in report.rows} == {"ok"}
    return {row.policy: row for row in report.rows}


def test_a_fifth_of_the_cache_keeps_the_codes_where_heads_share_it(needles):
    full, ours = needles["full"].accuracy, needles["shares(surrogate)"].accuracy
    assert full > 0.75
    assert ours > 0.85 * full
    assert needles["shares(surrogate)"].compactions >= 4
    assert needles["shares(surrogate)"].kv_bytes < 0.35 * needles["full"].kv_bytes


def test_equal_heads_lose_most_of_them(needles):
    assert needles["surrogate"].accuracy < 0.6 * needles["full"].accuracy
    assert needles["surrogate"].kv_bytes == pytest.approx(needles["shares(surrogate)"].kv_bytes, rel=0.05)


def test_even_random_tokens_do_better_with_shares_than_the_best_of_equal_heads(needles):
    assert needles["shares(random, by=static)"].accuracy > needles["surrogate"].accuracy + 0.1
