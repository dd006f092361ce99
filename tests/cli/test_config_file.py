"""--config: options of a command in a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvreclaim.cli import serve as serving
from kvreclaim.cli.main import CommandTable, app
from kvreclaim.errors import InvalidArgumentError

runner = CliRunner()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `serve` and `generate` were called with, instead of a start."""
    found: dict[str, Any] = {}

    def stop(settings: Any, engine: Any) -> None:
        found.update(settings=settings, engine=engine)
        raise InvalidArgumentError("stopped here.")

    monkeypatch.setattr(serving, "_check_lasting", stop)
    return found


def preset(directory: Path, text: str) -> str:
    path = directory / "preset.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


PRESET = """
model: demo
max-model-len: 333
enable_prefix_caching: false
system: You are terse.
run:
  temperature: 0.2
serve:
  served-model-name: [coder, small]
  port: 7
"""


def test_a_preset_reaches_the_command_and_the_command_line_wins(
    tmp_path: Path, reached: dict[str, Any]
) -> None:
    path = preset(tmp_path, PRESET)
    result = runner.invoke(app, ["serve", "--port", "9", f"--config={path}"])
    assert "stopped here" in result.output, result.output
    assert reached["engine"].max_model_len == 333
    assert reached["engine"].enable_prefix_caching is False
    assert reached["settings"].system == "You are terse."
    assert reached["settings"].served_model_name == ("coder", "small")
    assert reached["settings"].port == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temperature: 1", "'temperature', which is no option of `kvreclaim serve`"),
        ("served: {port: 7}", "has a group 'served'"),
        ("port: [7, 8]", "several values of 'port'"),
        ("port: null", "'port' None"),
        ("port: x", "'--port'"),
        ("[a]", "must map options"),
        ("a: [", "no file of YAML"),
        ("config: other.yaml", "'config', which is no option"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, message: str) -> None:
    result = runner.invoke(app, ["serve", "--config", preset(tmp_path, text)])
    assert result.exit_code == 2
    assert message in result.output


def test_a_file_that_is_not_there() -> None:
    result = runner.invoke(app, ["generate", "--config", "/nonesuch.yaml", "--prompt", "a"])
    assert result.exit_code == 2
    assert "/nonesuch.yaml" in result.output


@pytest.mark.parametrize("command", ["run", "serve", "generate"])
def test_large_commands_take_one(command: str) -> None:
    names = {flag for each in CommandTable()[command].params for flag in each.opts}
    assert "--config" in names
