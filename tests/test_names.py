"""Names, docstrings and imports of the package: a class name means one thing, a docstring is a sentence, and
no file needs one that needs it, not even for an annotation."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import kvreclaim

ROOT = Path(kvreclaim.__file__).parent
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
TWINS = re.compile(r"integrations/vllm/v0_|ops/(native|triton)/decoder\.py")
"""Modules for one minor version of vLLM or for one back-end each: two may define one interface's class."""
FRAGMENTS = ("Of ", "That ", "Those ", "As ", "Who ", "Whose ", "Whoever ", "Whatever ")
"""Beginnings of a docstring that only completes a signature."""


def doubles(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Public class names with more than one definition, twins counted as one place."""
    places: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add("twins" if TWINS.match(name) else f"{name}:{node.lineno}")
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


def fragments(trees: dict[str, ast.Module]) -> list[str]:
    """Docstrings, those of attributes included, that begin like the rest of a sentence."""
    return [
        f"{name}:{node.lineno}: {node.value.value[:60]}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.value.value.startswith(FRAGMENTS)
    ]


def test_a_class_name_means_one_thing() -> None:
    assert doubles(TREES) == {}


def test_docstrings_are_sentences() -> None:
    tests = {str(path): ast.parse(path.read_text()) for path in Path(__file__).parent.rglob("*.py")}
    assert fragments({**TREES, **tests}) == []


def test_doubles_and_fragments_are_found() -> None:
    one = 'class A:\n    """Of one."""\n\nclass _B: ...\n'
    trees = {"a.py": ast.parse(one), "b.py": ast.parse(one)}
    assert doubles(trees) == {"A": ["a.py:1", "b.py:1"]}
    assert len(fragments(trees)) == 2
    for twins in (
        ("integrations/vllm/v0_32/a.py", "integrations/vllm/v0_33/a.py"),
        ("ops/native/decoder.py", "ops/triton/decoder.py"),
    ):
        assert doubles({name: ast.parse(one) for name in twins}) == {}


def module_name(path: Path, root: Path) -> str:
    """Dotted; a package's __init__ is named like the package."""
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(root: Path) -> dict[str, set[str]]:
    """For each module under a package's folder, those modules of it that it names in an import, wherever that
    stands: at the top, in a function, under TYPE_CHECKING."""
    paths = {module_name(path, root): path for path in root.rglob("*.py")}
    return {
        name: set(_imported(ast.parse(path.read_text()), name, path.stem == "__init__", paths)) - {name}
        for name, path in paths.items()
    }


def _imported(tree: ast.AST, importer: str, is_package: bool, known: Mapping[str, object]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            parts = importer.split(".")
            above = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                if name in known:
                    yield name
                elif base in known:
                    yield base


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of modules that all lead to one another, by name; Tarjan's algorithm."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        open_.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in open_:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            start = open_.index(name)
            found.append(sorted(open_[start:]))
            del open_[start:]

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return sorted(group for group in found if len(group) > 1)


def test_no_file_needs_one_that_needs_it():
    assert circles(import_graph(ROOT)) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a": "import pkg.b", "b": "import os"}, []),
        ({"a": "import pkg.b", "b": "def f():\n    from pkg import a"}, [["pkg.a", "pkg.b"]]),
        (
            {"a": "from pkg.b import x", "b": "if T:\n    from pkg.a import y"},
            [["pkg.a", "pkg.b"]],
        ),
        ({"__init__": "from pkg.a import x", "a": "from pkg import x"}, [["pkg", "pkg.a"]]),
        ({"__init__": "from .a import x", "a": "from . import b", "b": ""}, []),
        (
            {"a": "from .b import x", "b": "from .c import x", "c": "from .a import x", "d": "import pkg.a"},
            [["pkg.a", "pkg.b", "pkg.c"]],
        ),
        (
            {"a": "import pkg.b", "b": "import pkg.a", "c": "import pkg.d", "d": "import pkg.c, pkg.a"},
            [["pkg.a", "pkg.b"], ["pkg.c", "pkg.d"]],
        ),
    ],
)
def test_circles_are_found(files, expected, tmp_path):
    root = tmp_path / "pkg"
    root.mkdir()
    for name, text in files.items():
        (root / f"{name}.py").write_text(text)
    assert circles(import_graph(root)) == expected
