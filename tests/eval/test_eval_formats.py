"""KV formats as an axis of the grid: engines over the same weights, bytes, baselines, the journal."""

from __future__ import annotations

import json

import pytest
from guess import SMALL, Guess

from kvreclaim import LLM, CompressionConfig
from kvreclaim.eval import Answer, TaskOptions, evaluate
from kvreclaim.eval.journal import JOURNAL
from kvreclaim.eval.plan import EvalPlan, GridColumn
from kvreclaim.eval.runner import open_runners
from kvreclaim.ops.formats import FORMATS

FORMS = ["fp32", "bf16", "int8", "int4"]
POLICIES = ["full", "knorm"]


@pytest.fixture(scope="module")
def llm(tiny_dir):
    return LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=40)


@pytest.fixture(scope="module")
def report(llm):
    settings = {**SMALL, "num_examples": 2}
    return evaluate(llm, POLICIES, [0.6, 0.12], [Guess()], kv_cache_dtypes=FORMS, **settings)


def row(report, policy, form, fraction):
    (found,) = [
        r for r in report.rows if (r.policy, r.kv_cache_dtype, r.fraction) == (policy, form, fraction)
    ]
    return found


def block_bytes(llm, form) -> int:
    return FORMATS[form].bytes_per_block(llm.loaded.facts.layers, 16)


def test_a_cell_is_what_an_engine_of_that_format_says(llm, report):
    other = llm.sibling(kv_cache_dtype="int8")
    right = judged = 0
    for index in range(2):
        item = Guess().item(0, index)
        share = 0.12 * item.num_tokens * block_bytes(llm, "fp32") / 16
        config = CompressionConfig(
            "knorm", int(share / block_bytes(llm, "int8")) * 16, interval=16, sinks=2, recent=8
        )
        other.engine.memory.reset_prefix_cache()
        (out,) = other.score([list(item.prompt)], [list(item.continuation)], config)
        outcome = Guess().judge(item, Answer(tuple(out.predicted)))
        right, judged = right + outcome.points, judged + outcome.out_of
    found = row(report, "knorm", "int8", 0.12)
    assert (found.status, found.value) == ("ok", right / judged)
    assert found.budget > 3 * row(report, "knorm", "fp32", 0.12).budget


def test_bytes_are_those_of_the_format(llm, report):
    for form in FORMS:
        found = row(report, "full", form, 1.0)
        assert found.kv_bytes == pytest.approx(10.5 * block_bytes(llm, form))  # 10 and 11 blocks
        assert found.kv_bytes_full == 10.5 * block_bytes(llm, "fp32")
        assert found.num_tokens == 160.5


def test_where_the_format_alone_meets_the_budget_the_row_is_the_full_cache(report):
    for form in FORMS[1:]:
        full, alone = row(report, "full", form, 1.0), row(report, "knorm", form, 0.6)
        assert (alone.status, alone.value, alone.kv_bytes) == ("ok", full.value, full.kv_bytes)
        assert alone.reason == "the format alone meets the budget: this is the full cache"
    assert row(report, "knorm", "fp32", 0.6).compactions > 0


def test_all_are_compared_with_the_first_formats_full_cache(report):
    base = row(report, "full", "fp32", 1.0).value
    for each in report.rows:
        assert each.of_full == pytest.approx(each.value / base)


def test_agreement_is_with_the_first_formats_full_cache(llm):
    options = TaskOptions(num_tokens=120)
    settings = {**SMALL, "num_examples": 2, "kv_cache_dtypes": ["fp32", "bf16", "int4"]}
    rows = evaluate(llm, ["full"], [0.5], ["agreement"], options=options, **settings).rows
    same, near, far = (r.extra["kl"] for r in rows)
    assert same == 0.0 < near < far


def test_agreement_in_the_journal_is_not_taken_for_agreement_with_another_format(llm, tmp_path):
    options, settings = TaskOptions(num_tokens=120), {**SMALL, "num_examples": 2}

    def kl(formats: list[str], **more) -> list[float]:
        grid = {**settings, **more, "kv_cache_dtypes": formats}
        rows = evaluate(llm, ["full"], [0.5], ["agreement"], options=options, **grid).rows
        return [row.extra["kl"] for row in rows]

    there = kl(["fp32", "int4"], out=tmp_path)
    back = kl(["int4", "fp32"], out=tmp_path)
    assert back == kl(["int4", "fp32"])
    assert there[0] == back[0] == 0.0 < min(there[1], back[1])


def test_the_callers_engine_serves_its_format_and_names_of_one_format_share_an_engine(llm):
    runners = open_runners(llm, EvalPlan(kv_cache_dtypes=["auto", "float32", "bf16"]))
    assert list(runners) == ["auto", "fp32", "bf16"]
    assert runners["auto"].llm is runners["fp32"].llm is llm
    assert runners["bf16"].llm is not llm
    assert runners["bf16"].llm.loaded is llm.loaded
    assert runners["bf16"].first is runners["auto"]


def test_names_are_spelt_out_and_taken_once():
    plan = EvalPlan(policies=["full"], kv_cache_dtypes=["fp8", "fp8_e4m3", "bfloat16"])
    assert plan.settings() == [GridColumn("full", 1.0, "fp8_e4m3"), GridColumn("full", 1.0, "bf16")]


def test_formats_are_cells_of_their_own_and_what_is_the_same_is_run_once(llm, tmp_path):
    settings = {**SMALL, "num_examples": 2, "kv_cache_dtypes": ["fp32", "int8"]}
    evaluate(llm, POLICIES, [0.6, 0.5], [Guess()], out=tmp_path, **settings)
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    about = [line["about"] for line in lines if "about" in line]
    assert sorted((each["kv_format"], each["spec"], each["budget"]) for each in about) == [
        ("fp32/1", "full", 1.0),
        ("fp32/1", "knorm", 0.5),
        ("fp32/1", "knorm", 0.6),
        ("int8/1", "full", 1.0),
    ]


def test_the_header_says_what_each_format_takes(report):
    head = report.header
    assert [each.name for each in head.kv_formats] == FORMS
    assert head.kv_formats[0].bytes_per_token == head.kv_bytes_per_token == 512
    assert head.kv_formats[3].bytes_per_token < head.kv_bytes_per_token / 5
    assert all(each.kernels.endswith(f"KV {each.name}") for each in head.kv_formats)


def test_budgets_and_bytes_are_those_of_the_layers_with_full_attention(tiny_dir):
    """Windows have tables of their own, which compression leaves alone."""
    llm = LLM(tiny_dir("gemma3"), dtype="float32", device="cpu", num_blocks=200)
    layers = [layer for layer in llm.loaded.facts.layers if layer.softmax.window is None]
    assert 0 < len(layers) < len(llm.loaded.facts.layers)
    report = evaluate(llm, POLICIES, [0.6], [Guess()], **{**SMALL, "num_examples": 2})
    rows = {row.policy: row for row in report.rows}
    full, knorm = rows["full"], rows["knorm"]
    assert full.kv_bytes_full == (10 + 11) / 2 * FORMATS["fp32"].bytes_per_block(layers, 16)
    assert knorm.examples_compressed == 2
    assert knorm.kv_bytes < full.kv_bytes
