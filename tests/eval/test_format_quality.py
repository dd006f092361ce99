"""Promises of formats, on the model that ships with the project: tokens in a pool, and answers kept."""

from __future__ import annotations

import pytest

from kvreclaim import LLM, demo_model
from kvreclaim.engine.request import sizing
from kvreclaim.eval import EvalReport, TaskOptions, evaluate
from kvreclaim.ops.formats import FORMATS

NUM_TOKENS, NUM_EXAMPLES = 1024, 16
TIMES_BF16 = {"int8": 1.9, "fp8_e4m3": 1.9, "int4": 3.4, "turboquant4": 3.4}
QUARTER_IN_INT4 = 0.25 * 18 / 128  # 32 numbers take 18 bytes, and 128 in the model's fp32


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(demo_model(), num_blocks=NUM_TOKENS // 16 * NUM_EXAMPLES, max_num_seqs=NUM_EXAMPLES)


def tokens_per_gib(llm: LLM) -> float:
    """Counted from what is allocated."""
    cache = llm.engine.cache
    allocated = sum(plane.nbytes for plane in cache.planes)
    return cache.num_blocks * cache.block_size / allocated * 2**30


@pytest.mark.parametrize("form", TIMES_BF16)
def test_a_pool_holds_more_tokens(llm, form):
    bf16, ours = (llm.sibling(kv_cache_dtype=name, num_blocks=64) for name in ("bf16", form))
    assert tokens_per_gib(ours) >= TIMES_BF16[form] * tokens_per_gib(bf16)


@pytest.mark.parametrize("form", FORMATS)
def test_the_pool_fills_the_memory_that_it_may_have_and_no_more(llm, form, monkeypatch):
    free = 6 * 2**20
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda device: free)
    small = llm.sibling(kv_cache_dtype=form, num_blocks=None, max_num_seqs=4, kv_memory_fraction=0.5)
    cache = small.engine.cache
    held = sum(plane.nbytes for plane in cache.planes)
    assert held <= free / 2 < held + cache.bytes_per_block


@pytest.fixture(scope="module")
def report(llm) -> EvalReport:
    formats = ["fp32", "int8", "fp8_e4m3", "int4"]
    options = TaskOptions(num_tokens=NUM_TOKENS)
    return evaluate(llm, ["full"], [1.0], ["recall"], options=options, kv_cache_dtypes=formats)


@pytest.mark.parametrize(("form", "points"), [("int8", 0.5), ("fp8_e4m3", 0.5), ("int4", 2.0)])
def test_answers_that_a_format_may_lose(report, form, points):
    rows = {row.kv_cache_dtype: row for row in report.rows}
    assert rows["fp32"].num_examples == rows[form].num_examples == NUM_EXAMPLES
    assert rows["fp32"].value > 0.98
    assert 100 * (rows["fp32"].value - rows[form].value) < points


def test_int4_and_a_quarter_of_the_tokens_keep_the_answers(llm, report):
    """A fourteenth of the bytes of bf16."""
    (row,) = evaluate(
        llm,
        ["query_mixture"],
        [QUARTER_IN_INT4],
        ["recall"],
        options=TaskOptions(num_tokens=NUM_TOKENS),
        kv_cache_dtypes=["int4"],
        recent=32,
        interval=64,
    ).rows
    assert (row.budget, row.num_examples) == (NUM_TOKENS // 4, NUM_EXAMPLES)
    assert row.compactions > 0
    assert row.value >= 0.96 * report.row("full", "recall").value
