"""`kvreclaim eval --url` against our own server: the answers and figures of an engine of this process."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import tiny
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from running import MODEL, running_server

from kvreclaim import LLM, SamplingParams
from kvreclaim.cli.main import app
from kvreclaim.eval import TaskOptions
from kvreclaim.eval.jsonl import normalise
from kvreclaim.eval.remote import RemoteServer
from kvreclaim.eval.tasks import make_tasks

KEY = "a-key-of-the-test"
NEW_TOKENS = 24
SIZES = ("--num-tokens", 1024, "--max-new-tokens", NEW_TOKENS, "--num-examples", 3, "--batch-size", 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, num_blocks=512)


@pytest.fixture(scope="module")
def server(model):
    with running_server(LLM(model, num_blocks=512), api_keys=(KEY,)) as running:
        yield running


@pytest.fixture
def sent(monkeypatch):
    """Text and length of the server's answer by prompt."""
    seen, complete = {}, RemoteServer.complete

    def noted(self, item):
        answer, length = complete(self, item)
        seen[item.prompt] = (answer.text, length)
        return answer, length

    monkeypatch.setattr(RemoteServer, "complete", noted)
    return seen


def evaluate(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, (*SIZES, *arguments))])


def remote(server, model, *arguments, key=KEY):
    return evaluate("--url", server.base_url, "--api-key", key, "--model", model, *arguments)


def generated(llm, prompt):
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    (out,) = llm.generate([{"prompt_token_ids": list(prompt)}], params)
    return out.outputs[0].text, len(out.outputs[0].token_ids)


@pytest.fixture(scope="module")
def questions(llm, tmp_path_factory):
    """Two questions with the model's own words as answers, one with another."""
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"

    def lines(answers):
        pairs = ({"prompt": f"Say number {i}.", "answer": answer} for i, answer in enumerate(answers))
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    lines(["x"] * 3)
    (task,) = make_tasks([f"jsonl:{file}"], llm, TaskOptions(max_new_tokens=NEW_TOKENS))
    words = [normalise(generated(llm, task.item(0, i).prompt)[0]).split() for i in range(2)]
    lines([words[0][0], words[1][-1], "unlikely"])
    return f"jsonl:{file}"


def test_answers_and_figures_are_those_of_an_engine_here(server, model, llm, questions, sent, tmp_path):
    tasks = ("--tasks", f"recall,multi_query,{questions}")
    result = remote(server, model, *tasks, "--json", tmp_path / "server.json")
    assert result.exit_code == 0, result.output
    assert server.base_url in result.stdout
    made = make_tasks(
        ["recall", "multi_query", questions],
        llm,
        TaskOptions(num_tokens=1024, max_new_tokens=NEW_TOKENS),
    )
    items = [task.item(0, index) for task in made for index in range(3)]
    assert sent == {item.prompt: generated(llm, item.prompt) for item in items}

    result = evaluate("--model", model, "--policies", "full", *tasks, "--json", tmp_path / "here.json")
    assert result.exit_code == 0, result.output
    ours, theirs = (json.loads((tmp_path / f"{side}.json").read_text()) for side in ("here", "server"))
    for own, other in zip(ours["rows"], theirs["rows"], strict=True):
        same = ("task", "value", "ci95", "num_examples", "num_judged", "num_tokens", "lost_at", "asked_at")
        assert [own[name] for name in same] == [other[name] for name in same]
        assert (own["policy"], other["policy"]) == ("full", "server")
        assert (other["kv_bytes"], other["blocks_freed"], other["of_full"]) == (None, None, None)
    assert ours["rows"][-1]["value"] == pytest.approx(2 / 3)
    assert theirs["header"]["url"] == server.base_url


def test_a_stopped_run_goes_on(server, model, questions, sent, tmp_path):
    arguments = ("--tasks", questions, "--out", tmp_path)
    assert remote(server, model, *arguments).exit_code == 0
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]) + lines[-1][:20])
    first = json.loads((tmp_path / "report.json").read_text())["rows"]
    sent.clear()
    assert remote(server, model, *arguments).exit_code == 0
    assert len(sent) == 1
    again = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["value"] for row in again] == [row["value"] for row in first]


def test_the_server_names_its_model(server, questions, sent):
    found = RemoteServer(f"{server.base_url}/v1/", KEY)
    assert (found.model, found.root) == (MODEL, MODEL)
    assert found.max_model_len == server.service.max_model_len


def one_line(text):
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--tasks", "needles"), "scores given answers"),
        (("--tasks", "perplexity:prose"), "scores given answers"),
        (("--policies", "knorm", "--block-size", 32), "--policies, --block-size set an engine"),
        (("--num-tokens", 10**6), "the server's context has"),
    ],
)
def test_what_no_server_does_is_refused_in_one_sentence(server, model, arguments, named):
    result = remote(server, model, *("--tasks", "recall"), *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert named in one_line(result.stderr)


def test_a_wrong_key_and_no_server_are_one_sentence_each(server, model):
    result = remote(server, model, "--tasks", "recall", key="another")
    assert result.exit_code == 2
    assert "status 401" in result.stderr
    result = evaluate("--url", "http://127.0.0.1:9", "--model", model, "--tasks", "recall")
    assert result.exit_code == 2
    assert "http://127.0.0.1:9 does not answer" in result.stderr
    assert "add --url" in evaluate("--api-key", KEY, "--model", model).stderr
    assert "such as http://" in evaluate("--url", "localhost", "--model", model).stderr


def test_a_refused_request_is_an_error_of_its_task(server, model, monkeypatch):
    init = RemoteServer.__init__

    def unlimited(self, *args):
        init(self, *args)
        self.max_model_len = None

    monkeypatch.setattr(RemoteServer, "__init__", unlimited)
    longer = server.service.max_model_len + 256
    result = remote(server, model, "--tasks", "recall", "--num-tokens", longer, "--max-new-tokens", 240)
    assert result.exit_code == 1, result.output
    assert "refuses /v1/completions with status 400" in one_line(result.stdout)
