"""RULER's rows, prompts and points are those of its own package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvreclaim import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import Answer, Item, TaskOptions, evaluate, task_names
from kvreclaim.eval.ruler import rows as rows_module
from kvreclaim.eval.ruler.task import RulerTask
from kvreclaim.eval.tasks import make_tasks

ruler = pytest.importorskip("long_context_eval")
TASKS = ["ruler:vt", "ruler:niah_single_1"]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRECLAIM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def llm(real_dir):
    return LLM(real_dir, device="cpu", num_blocks=300, max_model_len=1200)


@pytest.fixture(scope="module")
def tasks(llm):
    return dict(
        zip(TASKS, make_tasks(TASKS, llm, TaskOptions(num_tokens=1024, max_new_tokens=32)), strict=True)
    )


def prepared(real_dir, folder, name):
    """Rows that the package's own command writes."""
    script = Path(ruler.__path__[0]) / "data" / "prepare.py"
    options = {"save_dir": folder, "task": name, "tokenizer_path": real_dir, "tokenizer_type": "hf"}
    options |= {"max_seq_length": 1024, "num_samples": 3}
    command = [
        sys.executable,
        script,
        *(part for key, value in options.items() for part in (f"--{key}", value)),
    ]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run([str(part) for part in command], check=True, env=os.environ | {"PATH": path})
    lines = (folder / name / "validation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_rows_are_those_of_the_package(real_dir, llm, tasks, tmp_path):
    task = tasks["ruler:vt"]
    for index, row in enumerate(prepared(real_dir, tmp_path, "vt")):
        ours = task.rows.row("vt", 0, index)
        assert ours.document + ours.question + ours.answer_prefix == row["input"]
        assert list(ours.answers) == row["outputs"]


@pytest.mark.parametrize("name", TASKS)
def test_the_row_is_a_users_turn_and_the_answer_begins_as_published(llm, tasks, name):
    for index in range(3):
        row, item = tasks[name].rows.row(name.partition(":")[2], 0, index), tasks[name].item(0, index)
        turn = [{"role": "user", "content": row.document + row.question}]
        text = llm.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        assert llm.tokenizer.decode(item.prompt) == text + row.answer_prefix
        document, question = item.prompt[: item.compress_at], item.prompt[item.compress_at :]
        assert llm.tokenizer.decode(document).rstrip().endswith(row.document.rstrip())
        assert llm.tokenizer.decode(question).lstrip().startswith(row.question)
        known = RulerTask(name, tasks[name].rows, "niah", 128, known=True).item(0, index)
        assert known == Item(item.prompt, max_new_tokens=128, payload=item.payload)


@pytest.mark.parametrize("kind", ["niah", "qa"])
def test_points_are_the_packages(kind):
    from long_context_eval.eval.synthetic.constants import TASKS as RULES

    task = RulerTask(f"ruler:{kind}", None, kind, 8, known=False)
    cases = [("The Blue one, and 42.", ("blue", "7", "42")), ("none", ("a", "b")), ("it is B", ("b",))]
    scores = [task.judge(Item((), payload=right), Answer(text=text)) for text, right in cases]
    percent = 100 * sum(score.points for score in scores) / sum(score.out_of for score in scores)
    texts, answers = [text for text, _ in cases], [list(right) for _, right in cases]
    assert round(percent, 2) == RULES[kind]["metric_fn"](texts, answers)


def test_a_small_part_runs_and_its_mean_is_reported(llm, tasks):
    before = llm.stats().totals.prompt_tokens
    policies, settings = ["full", "shares(surrogate)"], {"num_examples": 2, "interval": 64, "recent": 32}
    report = evaluate(llm, policies, [0.2], list(tasks.values()), **settings)
    computed = llm.stats().totals.prompt_tokens - before
    assert {row.status for row in report.rows} == {"ok"}
    assert report.tasks == [*TASKS, "ruler, mean of 2"]
    assert report.row("full", TASKS[1]).accuracy == 1
    assert report.row("shares(surrogate)", TASKS[1], 0.2).kv_bytes < report.row("full", TASKS[1]).kv_bytes / 3
    for row in report.of("ruler, mean of 2"):
        values = [report.row(row.policy, task, row.fraction).value for task in TASKS]
        assert row.value == pytest.approx(sum(values) / 2)
        assert row.num_examples == 4
    items = [tasks[name].item(0, index) for name in TASKS for index in range(2)]
    questions = sum(len(item.prompt) - item.compress_at for item in items)
    documents = sum(item.compress_at for item in items)
    assert computed < documents + questions + 3 * (questions + 4 * 2 * llm.engine.config.block_size)


def test_an_unknown_task_is_refused(llm):
    with pytest.raises(
        InvalidArgumentError, match=r"'ruler:niah' is unknown; RULER has niah_single_1,.*qa_2"
    ):
        make_tasks(["ruler:niah"], llm, TaskOptions())


def test_without_the_package_the_error_says_how_to_get_it(llm, monkeypatch):
    monkeypatch.setattr(task_names, "find_spec", lambda name: None)
    task_names.published_tasks.cache_clear()
    with pytest.raises(InvalidArgumentError, match=r"pip install 'kvreclaim\[ruler\]'"):
        make_tasks(["ruler"], llm, TaskOptions())


def test_a_package_that_a_script_lacks_is_named_with_what_brings_it(llm, monkeypatch):
    error = "ModuleNotFoundError: No module named 'scipy'"
    monkeypatch.setattr(rows_module, "_run", lambda *given: given[-1].write(error) and ())
    with pytest.raises(InvalidArgumentError, match=rf"for fwe \({error}\); pip install 'kvreclaim\[ruler\]'"):
        make_tasks(["ruler:fwe"], llm, TaskOptions(num_tokens=1111))


def test_rows_of_a_task_are_kept_when_the_next_one_is_stopped(llm, monkeypatch, capfd):
    run, options = rows_module._run, TaskOptions(num_tokens=1500)

    def stopped(*given):
        yield next(run(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(rows_module, "_run", stopped)
    with pytest.raises(KeyboardInterrupt):
        make_tasks(["ruler:vt", "ruler:niah_single_1"], llm, options)
    commands_run = []
    monkeypatch.setattr(rows_module, "_run", lambda folder, commands, *_: commands_run.extend(commands) or ())
    with pytest.raises(InvalidArgumentError, match="no rows of 1500 tokens for niah_single_1"):
        make_tasks(["ruler:vt", "ruler:niah_single_1"], llm, options)
    assert commands_run == ["niah_single_1"]
    assert capfd.readouterr().err == "RULER: making 16 rows of 1,500 tokens for vt (1 of 2)\n"
