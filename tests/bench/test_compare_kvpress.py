"""`python -m benchmarks compare_kvpress` on the demo model, with a script in the place of kvpress."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import tiny
from typer.testing import CliRunner

from benchmarks import compare_kvpress
from benchmarks.__main__ import app
from kvreclaim import demo_model
from kvreclaim.eval import Item, TaskScore
from kvreclaim.eval.task import PlainTask

CONTEXT, QUESTION = 600, 20
WORKER = """
import json, sys
if len(sys.argv) == 1:
    print(json.dumps({"version": "0", "presses": ["full", "half", "none"]}))
    sys.exit()
for line in sys.stdin:
    row = json.loads(line)
    with open(__file__ + ".cells", "a") as file:
        file.write(json.dumps(row["cells"]) + "\\n")
    for press, share in row["cells"]:
        cell = {"press": press, "share": share}
        if press == "none":
            print(json.dumps(cell | {"refused": "not for this model"}))
            continue
        tokens = share * row["compress_at"] + 24
        cell |= {"text": "yes" if press == "full" else "", "kept": share, "kv_tokens": tokens}
        print(json.dumps(cell | {"num_generated": 4, "prompt_s": 2.0, "answer_s": 1.0}))
    sys.stdout.flush()
"""


@dataclass(frozen=True)
class Yes(PlainTask):
    """The answer must be yes."""

    name: str = "yes"
    identity: ClassVar = {"kind": "yes"}

    def item(self, seed, index):
        (tokens,) = tiny.prompts((CONTEXT + QUESTION,), seed=index)
        return Item(tuple(token % 200 for token in tokens), max_new_tokens=4, compress_at=CONTEXT)

    def judge(self, item, answer):
        return TaskScore(answer.text == "yes", 1)


@pytest.fixture
def run(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(compare_kvpress, "WORKER", worker)
    monkeypatch.setattr(compare_kvpress, "make_tasks", lambda names, llm, options: [Yes()])

    def invoke(*arguments):
        options = ("--model", demo_model(), "--kvpress-python", sys.executable, "--num-tokens", CONTEXT)
        more = ("--num-examples", 2, "--policies", "full,knorm", "--budgets", 0.2, "--out", tmp_path / "out")
        return CliRunner().invoke(app, ["compare_kvpress", *map(str, (*options, *more, *arguments))])

    return invoke


def test_both_sides_stand_in_one_report_and_a_second_run_asks_for_what_is_missing(run, tmp_path):
    for _ in range(2):
        result = run("--threads", 1)
        assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {row["policy"]: row for row in report["rows"]}
    assert list(rows) == ["full", "knorm", "kvpress full", "kvpress half", "kvpress none"]
    assert [rows[f"kvpress {press}"]["value"] for press in ("full", "half", "none")] == [1, 0, None]
    assert (rows["kvpress half"]["of_full"], rows["kvpress half"]["num_examples"]) == (0, 2)
    assert (rows["kvpress none"]["status"], rows["kvpress none"]["reason"]) == (
        "refused",
        "not for this model",
    )
    kept = [rows[policy]["extra"]["kept"] for policy in ("knorm", "kvpress half")]
    assert kept[1] == 0.2
    assert 0 <= CONTEXT * (kept[1] - kept[0]) < report["header"]["block_size"]
    assert rows["knorm"]["compactions"] == 2
    cells = [json.loads(line) for line in (tmp_path / "worker.py.cells").read_text().splitlines()]
    assert cells == [
        [["full", 1], ["half", 0.2], ["none", 0.2]],
        [["full", 1], ["half", 0.2]],
        [["none", 0.2]],
    ]


def test_an_unknown_press_is_refused_before_anything_runs(run, tmp_path):
    result = run("--presses", "full,snap")
    assert result.exit_code == 2
    assert "'snap' is unknown; known are full, half, none" in result.stderr
    assert not (tmp_path / "out").exists()
