"""A run that was killed goes on, and figures never meet other arguments than their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
from guess import POLICIES, SMALL, Guess

from kvreclaim import LLM
from kvreclaim.eval import EvalPlan, evaluate
from kvreclaim.eval.compare import run_plan
from kvreclaim.eval.journal import JOURNAL
from kvreclaim.eval.runner import BatchRunner


@pytest.fixture(scope="module")
def model(tiny_dir):
    return tiny_dir("llama")


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, dtype="float32", device="cpu", num_blocks=100)


@pytest.fixture(scope="module")
def report(llm):
    return evaluate(llm, POLICIES, [0.5, 0.3], [Guess()], seeds=[0, 1], **SMALL)


class Killed(Exception):
    """Stands for a kill."""


@pytest.fixture
def count(monkeypatch):
    """Counts examples that are really run; killed after `count.limit` batches."""
    seen = SimpleNamespace(examples=0, batches=0, limit=None)
    run = BatchRunner.run

    def counted(self, task, items, setting):
        if seen.batches == seen.limit:
            raise Killed
        seen.batches += 1
        seen.examples += len(items)
        return run(self, task, items, setting)

    monkeypatch.setattr(BatchRunner, "run", counted)
    return seen


def without_times(report):
    return [row.model_dump(exclude={"elapsed_s", "tokens_per_s"}) for row in report.rows]


def test_a_killed_run_goes_on_where_it_was(llm, report, tmp_path, count):
    arguments = (llm, POLICIES, [0.5, 0.3], [Guess()])
    count.limit = 7
    with pytest.raises(Killed):
        evaluate(*arguments, seeds=[0, 1], out=tmp_path, **SMALL)
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"cell":"half a li')
    done, count.limit = count.examples, None
    assert 0 < done < 50
    resumed = evaluate(*arguments, seeds=[0, 1], out=tmp_path, **SMALL)
    assert count.examples == 50
    assert without_times(resumed) == without_times(report)
    evaluate(*arguments, seeds=[0, 1], out=tmp_path, **SMALL)
    assert count.examples == 50


@pytest.mark.parametrize(
    "change",
    [
        {"interval": 12},
        {"sinks": 3},
        {"recent": 9},
        {"protect_prompt": True},
        {"mode": "union"},
        {"seeds": [7]},
        {"budgets": [0.45]},
        {"policies": ["knorm(keep=large)"]},
        {"tasks": [Guess(num_tokens=150)]},
        {"tasks": [Guess(name="other")]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_argument_never_meets_old_cells(llm, tmp_path, count, change):
    first = {"policies": ["knorm"], "budgets": [0.5], "tasks": [Guess()], **SMALL}
    if "keep=large" in str(change):
        pytest.importorskip("kvreclaim.compression.spec.grammar")
    evaluate(llm, out=tmp_path, **first)
    assert count.examples == 5
    evaluate(llm, out=tmp_path, **{**first, **change})
    assert count.examples == 10


def test_other_weights_never_meet_old_cells(llm, tmp_path, count):
    other = tiny.save_model("llama", tmp_path / "other", seed=6)
    arguments = (["knorm"], [0.5], [Guess()])
    for chosen in (llm, LLM(other, dtype="float32", device="cpu", num_blocks=100)):
        evaluate(chosen, *arguments, out=tmp_path, **SMALL)
    assert count.examples == 10


def test_more_examples_and_seeds_are_added_to_those_there(llm, tmp_path, count):
    arguments = (llm, ["knorm"], [0.5], [Guess()])
    evaluate(*arguments, out=tmp_path, **SMALL)
    report = evaluate(*arguments, out=tmp_path, seeds=[0, 3], **{**SMALL, "num_examples": 6})
    assert count.examples == 12
    assert report.rows[0].num_examples == 12
    fewer = evaluate(*arguments, out=tmp_path, **{**SMALL, "num_examples": 2})
    assert count.examples == 12
    assert fewer.rows[0].num_examples == 2


def test_the_rest_is_estimated_after_one_example(llm, count):
    estimates = []
    plan = EvalPlan(policies=["knorm"], budgets=[0.5], **SMALL)
    run_plan(
        llm, plan, [Guess()], on_estimate=lambda seconds: estimates.append((seconds > 0, count.examples))
    )
    assert estimates == [(True, 1)]
    assert count.examples == 5
