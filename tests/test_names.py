"""Names and docstrings of the package: a class name means one thing, and a docstring is a sentence."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

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
    assert fragments(TREES) == []


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
