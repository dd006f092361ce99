"""Tasks by name on real engines, what is refused before anything runs, and the examples of the docs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import tiny
from guess import SMALL, Guess

from kvreclaim import LLM, demo_model
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import TaskOptions, evaluate
from kvreclaim.eval.runner import BatchRunner

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_text_tasks_run_from_generated_text(tmp_path):
    path = tiny.save_model("llama", tmp_path, max_position_embeddings=4096)
    llm = LLM(path, dtype="float32", device="cpu", num_blocks=500)
    (tmp_path / "q.jsonl").write_text('{"prompt": "%s", "answer": "x"}\n' % ("long " * 40))
    tasks = ["recall", "multi_query", "variable_tracking", "rsq:4", f"jsonl:{tmp_path}/q.jsonl"]
    options = TaskOptions(num_tokens=1600, max_new_tokens=24)
    settings = {**SMALL, "num_examples": 2}
    report = evaluate(llm, ["full", "knorm"], [0.3], tasks, options=options, **settings)
    assert {row.task for row in report.rows} == set(tasks)
    for row in report.rows:
        assert (row.status, row.speed_of) == ("ok", "generation"), row
        assert row.num_examples == (1 if row.task.startswith("jsonl") else 2)
    assert report.row("knorm", "recall").examples_compressed == 2
    assert set(report.row("full", "rsq:4").extra) == {"parsed", "current", "visited"}


def test_perplexity_and_agreement_run_on_a_text(llm, tmp_path):
    (tmp_path / "text.txt").write_text("then the stop opens and the bells end. " * 40)
    options = TaskOptions(num_tokens=200, text=tmp_path / "text.txt")
    tasks = ["perplexity", "agreement"]
    report = evaluate(llm, ["full", "knorm"], [0.4], tasks, options=options, seeds=[0, 1], **SMALL)
    full, ours = report.row("full", "perplexity"), report.row("knorm", "perplexity")
    assert full.num_examples == 5  # a file has no seeds
    assert full.accuracy is None
    assert full.value > 1
    assert ours.of_full == pytest.approx(ours.value / full.value)
    same, other = report.row("full", "agreement"), report.row("knorm", "agreement")
    assert (same.value, same.extra["kl"]) == (1.0, 0.0)
    assert other.value < 1
    assert other.extra["kl"] > 0


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (["chain"], {}, "not one of the text dialect, which has recall"),
        (["recall:3"], {}, "unknown"),
        (["rsq:no"], {}, "rsq:12"),
        (["perplexity"], {}, "--text FILE"),
        (["jsonl:"], {}, "unknown; write jsonl:PATH"),
        (["jsonl:/none/such"], {}, "'/none/such' cannot be read"),
        (["recal"], {}, "did you mean recall"),
        (["agreement:poems"], {}, "write agreement or agreement:own"),
        (["perplexity"], {"text": Path("/none/such")}, "text is '/none/such', which is no file"),
        (["recall"], {"num_tokens": 256}, "raise the number of tokens"),
        (["recall"], {"dialect": "demo"}, "another vocabulary"),
        (["agreement", "agreement"], {"num_tokens": 100}, "each task once"),
        ([], {}, "each task once"),
    ],
)
def test_wrong_tasks_are_refused_before_anything_runs(llm, monkeypatch, tasks, options, message):
    monkeypatch.setattr(BatchRunner, "run", None)
    with pytest.raises(InvalidArgumentError, match=message):
        evaluate(llm, ["full"], [0.5], tasks, options=TaskOptions(**options), **SMALL)


def test_an_unknown_kv_format_is_refused_before_anything_runs(llm, monkeypatch):
    monkeypatch.setattr(BatchRunner, "run", None)
    with pytest.raises(InvalidArgumentError, match=r"kv_cache_dtype is 'fp7'.*fp8_e4m3, int8"):
        evaluate(llm, ["full"], [0.5], [Guess()], kv_cache_dtypes=["fp8", "fp7"], **SMALL)


def test_the_example_runs(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare_policies.py"])
    runpy.run_path(str(EXAMPLES / "compare_policies.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("agreement") == printed.count("copy") == 7
    assert "query_mixture" in printed


def test_the_documented_example_runs(capsys):
    text = (EXAMPLES.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "docs/evaluation.md", "exec"), {})
    assert capsys.readouterr().out.count("agreement knorm 0.25") == 1


def test_what_cannot_generate_is_still_scored():
    llm = LLM(demo_model(), num_blocks=100)
    settings = {"num_examples": 2, "interval": 32, "recent": 16, "free_running": True}
    options = TaskOptions(num_tokens=512)
    report = evaluate(llm, ["full", "oracle"], [0.3], ["chain"], options=options, **settings)
    full, oracle = report.rows
    assert (full.status, full.speed_of, full.reason) == ("ok", "generation", None)
    assert (oracle.status, oracle.speed_of, oracle.extra) == ("ok", "scoring", {})
    assert oracle.reason.startswith("not run freely: ")
    assert oracle.accuracy == pytest.approx(full.accuracy, abs=0.2)
    assert report.problems == {("note", oracle.reason): ["oracle 30% on chain"]}
