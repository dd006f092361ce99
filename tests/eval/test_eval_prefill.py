"""Ways of computing prompts as an axis of the grid."""

from __future__ import annotations

import pytest
from guess import SMALL, Guess

from kvreclaim import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import Answer, evaluate
from kvreclaim.eval.plan import EvalPlan

POOLED = "pooled(alpha=0.9, rows=16, first=16, last=4, layers=0, block=16, sinks=0, local=0)"


@pytest.fixture(scope="module")
def llm(tiny_dir):
    return LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=60, max_num_batched_tokens=128)


@pytest.fixture(scope="module")
def report(llm):
    settings = {**SMALL, "num_examples": 2}
    methods = ["dense", POOLED]
    return evaluate(llm, ["full", "knorm"], [0.5], [Guess()], sparse_prefill=methods, **settings)


def row(report, policy, method):
    (found,) = [r for r in report.rows if (r.policy, r.sparse_prefill) == (policy, method)]
    return found


def test_a_cell_is_what_an_engine_says_that_computes_prompts_so(llm, report):
    right = judged = 0
    for index in range(2):
        item = Guess().item(0, index)
        prompt = {"prompt_token_ids": list(item.prompt), "sparse_prefill": POOLED}
        (out,) = llm.score([prompt], [list(item.continuation)])
        outcome = Guess().judge(item, Answer(tuple(out.predicted)))
        right, judged = right + outcome.points, judged + outcome.out_of
    found = row(report, "full", POOLED)
    assert (found.status, found.value) == ("ok", right / judged)
    assert found.name == f"full, {POOLED}"


def test_what_was_read_stands_beside_it(report):
    assert 0 < row(report, "full", POOLED).extra["prefill_read"] < 1
    assert "prefill_read" not in row(report, "full", "dense").extra


def test_an_unknown_way_is_refused_before_anything_runs():
    with pytest.raises(InvalidArgumentError, match="sparse prefill 'flash' is unknown"):
        EvalPlan(sparse_prefill=["flash"])
