"""A journal survives kills, belongs to one run at a time, and never hands out results of other cells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
from guess import POLICIES, SMALL, Guess

from kvreclaim import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import EvalPlan, evaluate
from kvreclaim.eval.compare import run_plan
from kvreclaim.eval.journal import JOURNAL, Journal, cell_key
from kvreclaim.eval.results import Result
from kvreclaim.eval.runner import BatchRunner

ABOUT = {"policy": "knorm", "fraction": 0.25}
KEY = cell_key(ABOUT)


def result(points: float = 1.0) -> Result:
    return Result(
        points=points,
        out_of=3,
        found=(0.25, 1 / 3),
        lost=(0.5,),
        extra={"kl": 0.1},
        num_tokens=100,
        budget=25,
        full_blocks=7,
        answer_blocks=3,
        peak_blocks=4,
        blocks_freed=3,
        blocks_perfect=3,
        tokens_evicted=60,
        compactions=1,
        preemptions=0,
        timed_tokens=100,
        elapsed_s=0.5,
        generated=False,
    )


def test_what_was_appended_is_there_again(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append(KEY, ABOUT, [(0, result(1)), (1, result(2))])
        journal.append(KEY, ABOUT, [(5, result(3))])
    with Journal(tmp_path) as journal:
        assert journal.of(KEY) == {0: result(1), 1: result(2), 5: result(3)}
        assert journal.of(cell_key({**ABOUT, "fraction": 0.5})) == {}
    assert (tmp_path / JOURNAL).read_text().count('"about"') == 1


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_cut_by_a_kill_is_dropped_and_the_next_one_is_whole(tmp_path, cut):
    with Journal(tmp_path) as journal:
        journal.append(KEY, ABOUT, [(0, result(1)), (1, result(2))])
    path = tmp_path / JOURNAL
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(tmp_path) as journal:
        assert journal.of(KEY) == {0: result(1)}
        journal.append(KEY, ABOUT, [(2, result(3))])
    with Journal(tmp_path) as journal:
        assert journal.of(KEY) == {0: result(1), 2: result(3)}


def test_two_runs_cannot_share_a_journal(tmp_path):
    pytest.importorskip("fcntl")
    with Journal(tmp_path), pytest.raises(InvalidArgumentError, match="in use by another run"):
        Journal(tmp_path)
    Journal(tmp_path).close()


@pytest.mark.parametrize("line", ["{}", "no json", '{"cell":"a","index":0,"result":{"points":1}}'])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, line):
    path = tmp_path / JOURNAL
    path.write_text(line + "\n")
    with pytest.raises(InvalidArgumentError, match="no journal of this version"):
        Journal(tmp_path)
    assert path.read_text() == line + "\n"


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="--out"):
        Journal(tmp_path / "file" / "below")


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
