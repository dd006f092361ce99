"""The evaluation under max_loss: the engine's own budgets, and how many examples lost more than promised."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import tiny
from curves import curve
from guess import SMALL, Guess

from kvreclaim import LLM, CompressionConfig
from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression_settings import CONTENTS
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import Answer, evaluate
from kvreclaim.eval.plan import EvalPlan

TASK = Guess(num_tokens=440)
CURVE = curve("knorm", {("prose", 224): {160: 0.04}, ("lookups", 224): {176: 0.04}})


def test_examples_that_lost_more_are_counted(tiny_dir) -> None:
    """Prompts of 220 to 224 tokens have a budget; those of an example beyond have the full cache."""
    llm = LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=200)
    stats = calibrate(llm.loaded, tiny.prompts((90,)), num_centers=2).with_curve(CURVE)
    report = evaluate(
        llm, ["full", "knorm"], EvalPlan.budgets, [TASK], num_examples=12, stats=stats, max_loss=0.05
    )
    full, row = report.rows
    broken, budgets = 0, []
    for index in range(12):
        item = TASK.item(0, index)
        config = CompressionConfig("knorm", max_loss=0.05, stats=stats)
        whole, out = llm.score([item.prompt] * 2, [list(item.continuation)] * 2, [None, config])
        budgets.append(out.metrics.budget or item.num_tokens)
        shares = [
            s.points / s.out_of for s in (TASK.judge(item, Answer(o.predicted, ())) for o in (whole, out))
        ]
        broken += shares[0] - shares[1] > 0.05
    assert budgets[:10] == [176] * 10
    assert budgets[10:] == [450, 451]
    assert 0 < broken < 12
    assert row.extra["broken"] == pytest.approx(broken / 12)
    assert row.budget == round(sum(budgets) / 12)
    assert (row.keeps, row.max_loss, row.fraction) == ("max loss 0.05", 0.05, None)
    assert (full.max_loss, row.status) == (None, "ok")
    assert "broken" not in full.extra


def test_each_format_has_the_budgets_of_its_own_losses(tiny_dir) -> None:
    """Where even all tokens in a format lose more, the row has the reason."""
    llm = LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=200)
    places = [(content, 224) for content in CONTENTS]
    coded = {"int8": {192: 0.05, 224: 0.0}, "int4": {192: 0.3, 224: 0.1}}
    losses = curve(
        "knorm",
        {place: {160: 0.04} for place in places},
        {form: dict.fromkeys(places, row) for form, row in coded.items()},
    )
    report = evaluate(
        llm,
        ["full", "knorm"],
        EvalPlan.budgets,
        [TASK],
        num_examples=4,
        stats=calibrate(llm.loaded, tiny.prompts((90,)), num_centers=2).with_curve(losses),
        max_loss=0.05,
        kv_cache_dtypes=("auto", "int8", "int4"),
    )
    rows = {row.kv_cache_dtype: row for row in report.rows if row.policy == "knorm"}
    assert [rows[form].budget for form in ("auto", "int8")] == [160, 192]
    assert rows["int4"].status != "ok"
    assert "int4 lose more even if every token stays" in rows["int4"].reason


@pytest.mark.parametrize(("fields", "name"), [({"recent": 32}, "recent"), ({"budgets": (0.3,)}, "budgets")])
def test_nothing_else_is_set_beside_it(fields, name) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name} given with max_loss"):
        EvalPlan(max_loss=0.1, **fields)


QUESTION = 12
ALONE = {**SMALL, "num_examples": 1}


@dataclass(frozen=True)
class WithQuestion(Guess):
    """The last tokens of the prompt are a question."""

    name: str = "with_question"

    def item(self, seed, index):
        item = super().item(seed, index)
        return replace(item, compress_at=len(item.prompt) - QUESTION)


def test_a_cell_is_what_an_engine_says_that_compresses_there(llm):
    item = WithQuestion().item(0, 0)
    prompt = {"prompt_token_ids": list(item.prompt), "compress_prompt_at": item.compress_at}
    config = CompressionConfig("knorm", 48, interval=16, sinks=2, recent=8)
    (out,) = llm.score([prompt], [list(item.continuation)], config)
    report = evaluate(llm, ["full", "knorm"], [0.3], [WithQuestion()], **ALONE)
    score = WithQuestion().judge(item, Answer(tuple(out.predicted)))
    assert report.row("knorm", "with_question").value == score.points / score.out_of
    assert report.row("knorm", "with_question").tokens_evicted == out.metrics.tokens_evicted


def test_the_first_pass_sees_the_document_alone(llm, monkeypatch):
    seen, score = [], Knorm.score_many

    def noted(self, views):
        seen.extend(view.logical_len for view in views)
        return score(self, views)

    monkeypatch.setattr(Knorm, "score_many", noted)
    evaluate(llm, ["knorm"], [0.3], [WithQuestion()], **ALONE)
    assert seen[0] == WithQuestion().item(0, 0).compress_at


def test_all_policies_and_budgets_share_one_computation_of_the_document(llm):
    before = llm.stats().totals.prompt_tokens
    report = evaluate(llm, ["full", "knorm", "streaming_llm"], [0.4, 0.3], [WithQuestion()], **ALONE)
    assert {row.status for row in report.rows} == {"ok"}
    computed = llm.stats().totals.prompt_tokens - before
    num_prompt, block = len(WithQuestion().item(0, 0).prompt), llm.engine.config.block_size
    assert num_prompt < computed <= num_prompt + 5 * (QUESTION + block)
