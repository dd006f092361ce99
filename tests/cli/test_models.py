"""The model that a command takes, the line that it prints, and `kvreclaim fetch`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import tiny_gguf
from transformers import AutoTokenizer
from typer.testing import CliRunner

from kvreclaim import demo_model
from kvreclaim.cli.main import app
from kvreclaim.cli.model_names import model_of
from kvreclaim.model_paths import REAL_MODEL, write_source

runner = CliRunner()
QUESTION = "What is the capital of France? Answer in one word."


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("KVRECLAIM_HOME", os.fspath(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def fetched(home: Path, tiny_dir) -> Path:
    """A tiny model where the real one would be."""
    directory = home / "models" / REAL_MODEL
    shutil.copytree(tiny_dir("llama"), directory)
    write_source(directory, "a test")
    return directory


def run(*arguments: object):
    return runner.invoke(app, [str(argument) for argument in arguments])


def test_without_a_name_it_is_the_toy_which_says_so(home: Path) -> None:
    printed: list[str] = []
    assert model_of(None, printed.append) == demo_model()
    assert printed == [
        "model: the demo model, a toy for tests; `make real-model` or `kvreclaim fetch` brings a real one"
    ]


def test_without_a_name_it_is_the_real_model_once_it_is_there(fetched: Path) -> None:
    printed: list[str] = []
    assert model_of(None, printed.append) == fetched
    assert printed == [f"model: {REAL_MODEL} in {fetched}"]


def test_what_is_named_is_taken_in_silence(fetched: Path) -> None:
    printed: list[str] = []
    assert model_of("demo", printed.append) == demo_model()
    assert printed == []


def test_every_command_takes_it(fetched: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the end of the " * 20)
    commands = {
        "generate": ("--prompt", "the", "--max-tokens", 2),
        "calibrate": ("--text", text, "-o", tmp_path / "stats.safetensors", "--centers", 2),
        "eval": ("--tasks", "agreement", "--policies", "full", "--num-tokens", 100, "--num-examples", 1),
    }
    for command, options in commands.items():
        result = run(command, *options, "--device", "cpu")
        assert result.exit_code == 0, result.output
        assert result.stderr.startswith(f"model: {REAL_MODEL} in {fetched}\n"), command


@pytest.mark.parametrize("arguments", [(), ("--model", "demo")])
def test_the_server_names_and_logs_it(arguments: tuple[str, ...], fetched: Path, monkeypatch, caplog) -> None:
    started: list = []

    def serve(engine, config, listener) -> bool:
        listener.close()
        started.append((engine.name, config.served_model_name))
        return True

    monkeypatch.setattr("kvreclaim.server.entry.run.serve", serve)
    monkeypatch.setattr("kvreclaim.cli.serve.configure_logging", lambda *_, **__: None)
    with caplog.at_level("INFO", logger="kvreclaim.cli.serve"):
        result = run("serve", "--port", 0, "--no-engine-process", *arguments)
    assert result.exit_code == 0, result.output
    if arguments:
        assert started == [("demo_model", ("kvreclaim-demo",))]
        assert caplog.messages == [f"loading kvreclaim-demo from {demo_model()}"]
    else:
        assert started == [(REAL_MODEL, (REAL_MODEL,))]
        assert caplog.messages == [
            f"model: {REAL_MODEL} in {fetched}",
            f"loading {REAL_MODEL} from {fetched}",
        ]


def test_fetch_says_where_and_how_big(home: Path, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    first, again = (run("fetch", tmp_path / "tiny.gguf") for _ in range(2))
    assert first.exit_code == again.exit_code == 0, first.output
    assert "converting tiny.gguf" in first.stderr
    assert again.stderr == ""
    [line] = again.stdout.splitlines()
    assert line == first.stdout.strip()
    assert line.startswith("tiny (")
    assert line.endswith(f" MB): {home / 'models' / 'tiny'}")
    assert run("generate", "--model", home / "models" / "tiny", "--prompt", "the").exit_code == 0


def test_fetch_with_a_mistake_is_one_sentence(home: Path) -> None:
    result = run("fetch", "/no/such.gguf")
    assert result.exit_code == 2
    assert result.stderr == "error: '/no/such.gguf' is no file; pass the path of a .gguf file or a hub id.\n"
    assert not home.exists()


def test_chat_goes_through_the_template(fetched: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(fetched)
    for arguments, text in (((), "stop"), (("--chat",), "user: stop\nassistant: ")):
        result = run("generate", "--prompt", "stop", "--max-tokens", 2, *arguments)
        assert result.exit_code == 0, result.output
        [row] = [line for line in result.stderr.splitlines() if "num_prompt_tokens" in line]
        assert row.strip("│ ").split()[-1] == str(len(tokenizer.encode(text)))


def test_chat_without_a_template_is_refused(fetched: Path) -> None:
    (fetched / "chat_template.jinja").unlink()
    result = run("generate", "--model", fetched, "--prompt", "stop", "--chat")
    assert result.exit_code == 2
    assert "chat template" in result.stderr


def test_the_real_model_answers_a_question(real_dir: Path) -> None:
    result = run("generate", "--model", real_dir, "--chat", "--prompt", QUESTION, "--max-tokens", 16)
    assert result.exit_code == 0, result.output
    assert "Paris" in result.stdout
    assert "stop" in result.stderr


def test_a_long_talk_in_a_quarter_of_the_memory(real_dir: Path) -> None:
    text = " ".join(f"Line {i} of the list is about the number {i * 7}." for i in range(60))
    prompt = f"{text}\n\n{QUESTION}"
    compression = ("--kv-compression", "streaming_llm", "--kv-budget", 256, "--kv-compression-interval", 64)
    result = run(
        "generate", "--model", real_dir, "--chat", "--prompt", prompt, "--max-tokens", 16, *compression
    )
    assert result.exit_code == 0, result.output
    [row] = [line for line in result.stderr.splitlines() if "blocks_freed" in line]
    assert int(row.strip("│ ").split()[-1]) > 40
    assert "Paris" in result.stdout
