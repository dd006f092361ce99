"""Help texts at 80 columns: every name whole, and the frequent options of long commands on two screens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvreclaim.cli.main import app

SCREEN = 24
PAGED = ("run", "generate", "serve")


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that takes options, with the words that start it."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def shown(*words: str) -> list[str]:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def names_in(lines: list[str]) -> set[str]:
    """The names of options in the left column, as they are printed."""
    left = [line[2:].split("  ")[0] for line in lines if line.startswith("  -")]
    return {word.rstrip(",") for text in left for word in text.split() if word.startswith("-")}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_name_is_whole_at_80_columns(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    lines = shown(*path, "--help-all" if path[:1] in {(name,) for name in PAGED} else "--help")
    names = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    assert {name for name in names if name.startswith("-")} <= names_in(lines)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("name", PAGED)
def test_the_frequent_options_take_two_screens(name: str) -> None:
    short, whole = shown(name, "--help"), shown(name, "--help-all")
    frequent = names_in(short)
    assert len(short) <= 2 * SCREEN + 10
    assert 18 <= len([line for line in short if line.startswith("  -")]) <= 24
    assert frequent < names_in(whole)
    assert {"-c", "-t", "--kv-compression", "--kv-budget", "--device", "--help-all"} <= frequent


def test_serve_takes_two_screens() -> None:
    lines = shown("serve", "--help")
    assert len(lines) <= 2 * SCREEN
    assert {"-m", "--host", "--port", "--api-key", "--max-num-seqs"} <= names_in(lines)


@pytest.mark.parametrize(
    ("name", "arguments", "field"),
    [
        ("serve", ["-m", "a", "-c", "64", "-t", "2"], {"model": "a", "engine_max_model_len": 64}),
        ("generate", ["-m", "a", "-p", "b", "-n", "3"], {"prompt": "b", "params_max_tokens": 3}),
    ],
)
def test_short_options_are_those_of_llama_cpp(name: str, arguments: list[str], field: dict[str, Any]) -> None:
    context = COMMANDS[(name,)].make_context(name, arguments)
    assert field.items() <= context.params.items()
