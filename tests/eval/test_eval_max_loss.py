"""The evaluation under max_loss: the engine's own budgets, and how many examples lost more than promised."""

from __future__ import annotations

import pytest
import tiny
from curves import curve
from guess import Guess

from kvreclaim import LLM, CompressionConfig
from kvreclaim.calibrate.calibration import calibrate
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
    """Where even all tokens in a format lose more, the row says why there is none."""
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
