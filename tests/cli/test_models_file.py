"""`kvreclaim serve --models FILE`: the contents of the file, the options beside it, and their config."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvreclaim.cli.main import app
from kvreclaim.server.router.fleet import Fleet

runner = CliRunner()


@pytest.fixture(autouse=True)
def logs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvreclaim.cli.serve.configure_logging", lambda *_, **__: None)


def serve(folder: Path, text: str, *options: str):
    path = folder / "models.yaml"
    path.write_text(text, encoding="utf-8")
    return runner.invoke(app, ["serve", "--models", str(path), "--port", "0", *options])


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("{}", (), "which has no model"),
        ("[a]", (), "must map options"),
        ("a: demo", (), "a is 'demo'; give it options"),
        ("a: {}", (), "a: model is missing"),
        ("a: {model: /nonesuch}", (), "a: '/nonesuch' is no model here"),
        (
            "a: {model: demo, temperature: 1}",
            (),
            "a has 'temperature', which is no option of `kvreclaim serve`",
        ),
        ("a: {model: demo, port: 7}", (), "a has 'port', which is no option"),
        ("a: {model: demo, serve: {max-loaded: 7}}", (), "a has 'max-loaded', which is no option"),
        ("a: {model: demo, max-num-seqs: x}", (), "a: Invalid value for '--max-num-seqs'"),
        ("a: {model: demo, served-model-name: b}\nb: {model: demo}", (), "two models named 'b'"),
        (
            "a: {model: demo, memory-limit: 3}",
            ("--memory-limit", "2"),
            "a has memory-limit 3.0, but all models",
        ),
        ("a: {model: demo}", ("--model", "demo"), "--model is an option of one model"),
        ("a: {model: demo}", ("--kv-budget", "20%"), "--kv-budget is an option of one model"),
        ("a: {model: demo}", ("--idle-timeout", "-1"), "idle_timeout_s is -1.0"),
        ("a: {model: demo}", ("--max-loaded", "0"), "max_loaded is 0"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, text: str, options: tuple[str, ...], words: str) -> None:
    result = serve(tmp_path, text, *options)
    assert result.exit_code == 2, result.output
    [sentence] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert words in sentence


@pytest.mark.parametrize("option", ["--max-loaded", "--idle-timeout"])
def test_options_of_several_models_need_them(option: str) -> None:
    result = runner.invoke(app, ["serve", "--model", "demo", option, "3"])
    assert result.exit_code == 2
    assert f"{option} is an option of several models" in result.output


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Fleet]:
    """Collect the fleets that would be served; none is."""
    fleets: list[Fleet] = []
    monkeypatch.setattr("kvreclaim.server.router.app.serve", lambda fleet, listener: fleets.append(fleet))
    return fleets


FILE = """
coder_1: {model: demo, kv_budget: 20%, served-model-name: [x, y], run: {temperature: 1}, serve: {max-n: 3}}
b: {model: demo, memory-limit: 0.5, enable-prefix-caching: false}
c: {model: demo}
d: {model: demo}
"""


def test_presets_and_shares_of_the_limit(tmp_path: Path, started: list[Fleet]) -> None:
    assert serve(tmp_path, FILE, "--memory-limit", "6", "--api-key", "k", "--api-key", "l").exit_code == 0
    [fleet] = started
    assert list(fleet.presets) == ["coder_1", "x", "y", "b", "c", "d"]
    coder, b = fleet.presets["y"], fleet.presets["b"]
    own = ("--model=demo", "--kv-budget=20%", "--served-model-name=x", "--served-model-name=y", "--max-n=3")
    assert set(coder.arguments[2:]) == set(own)
    assert "--no-enable-prefix-caching" in b.arguments
    # Three may be loaded at once.
    assert [fleet._memory_gib(preset) for preset in (coder, b)] == [2.0, 0.5]
    assert [option for option in fleet.options() if "key" in option][:2] == ["--api-key=k", "--api-key=l"]
    [operator] = [option for option in fleet.options() if option.startswith("--operator-key=")]
    assert len(operator) > 40
