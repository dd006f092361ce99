"""The project stays below the limits in pyproject.toml ([tool.kvreclaim.size]); a change that raises one says
why in its commit message."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from kvreclaim.cli.main import app
from kvreclaim.engine.request.request import RequestSpec

ROOT = Path(__file__).parents[1]
TABLES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
LIMITS: dict[str, Any] = TABLES["kvreclaim"]["size"]
CODE = (".py", ".h", ".cpp", ".cmake", ".sh", "")
MODULES = sorted((ROOT / "src").rglob("*.py"))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def room_of(path: Path) -> str:
    """A folder of the package, "base" for its loose modules, or a folder beside src."""
    top, *rest = path.relative_to(ROOT).parts
    if top != "src":
        return top
    return rest[1] if len(rest) > 2 else "base"


def lines_by_room() -> Counter[str]:
    found: Counter[str] = Counter()
    for top in ("src", "csrc", "scripts", "benchmarks", "tests"):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and path.suffix in CODE and "__pycache__" not in path.parts:
                found[room_of(path)] += num_lines(path)
    return found


def test_every_room_is_below_its_limit_and_has_one() -> None:
    found, limits = lines_by_room(), LIMITS["rooms"]
    assert set(found) == set(limits)
    assert {room: lines for room, lines in found.items() if lines > limits[room]} == {}


def functions() -> Iterator[tuple[str, int]]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                yield f"{path.relative_to(ROOT)}:{node.name}", node.end_lineno - node.lineno + 1


def modules() -> Iterator[tuple[str, int]]:
    return ((str(path.relative_to(ROOT)), num_lines(path)) for path in MODULES)


@pytest.mark.parametrize("what", ["files", "functions"])
def test_long_files_and_functions_are_the_listed_ones(what: str) -> None:
    found = (
        functions() if what == "functions" else ((str(p.relative_to(ROOT)), num_lines(p)) for p in MODULES)
    )
    limit = LIMITS[what]
    assert {name: lines for name, lines in found if lines > limit["most"]}.keys() == set(limit["longer"])


def test_a_request_has_few_fields() -> None:
    assert len(fields(RequestSpec)) <= LIMITS["request_fields"]


def commands(group: Any, name: str) -> Iterator[tuple[str, int]]:
    yield name, len(group.params)
    for own, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{name} {own}".strip())


def test_options_of_each_command() -> None:
    found = dict(commands(typer.main.get_command(app), ""))
    limits = LIMITS["options"]
    assert {name: count for name, count in found.items() if count > limits.get(name, limits["others"])} == {}


@pytest.mark.parametrize("page", ["README.md", "docs"])
def test_words(page: str) -> None:
    path = ROOT / page
    pages = [path] if path.is_file() else sorted(path.glob("*.md"))
    assert sum(len(each.read_text(encoding="utf-8").split()) for each in pages) <= LIMITS["words"][page]
