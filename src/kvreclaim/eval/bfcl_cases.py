"""BFCL's multi-turn cases in the package `bfcl-eval`, and the calls of its functions.

Only its data, its checker and the functions' classes are imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from uuid import uuid4

from kvreclaim.eval.packages import task_package
from kvreclaim.parsers.pieces import ToolCall

BFCL = "bfcl"
EXTRA = "bfcl"
PACKAGE = "bfcl_eval"
REFUSED = ("Error during execution", '{"error"')
"""Beginnings of the results of failed or rejected calls."""


@dataclass(frozen=True, eq=False)
class BfclCase:
    """A case: the user's turns, functions, and correct calls.

    entry: as in the package's file; truth: calls by turn
    """

    entry: Mapping[str, Any]
    truth: Sequence[Sequence[str]]
    functions: Sequence[Mapping[str, Any]]

    def turn(self, number: int) -> list[dict[str, Any]]:
        """Return the user's messages; a turn that only offers more functions has the package's."""
        messages: list[dict[str, Any]] = self.entry["question"][number]
        more = _module("constants.default_prompts").DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
        return messages or [{"role": "user", "content": more}]

    def tools(self, turn: int) -> list[dict[str, Any]]:
        """Return the functions offered in a turn; later ones come last."""
        later = self.entry.get("missed_function", {})
        since = {name: int(at) for at, names in later.items() for name in names}
        known = sorted(self.functions, key=lambda each: since.get(each["name"], 0))
        return [
            {"type": "function", "function": each} for each in known if since.get(each["name"], 0) <= turn
        ]

    def run(self, steps: Sequence[Sequence[ToolCall]]) -> list[str]:
        """Return the results of the last step's calls; all steps are run, on new objects."""
        results: list[str] = []
        with _new_objects() as (package, name):
            for calls in steps:
                results = [self._run(call, package, name) for call in calls]
        return results

    def _run(self, call: ToolCall, package: Any, name: str) -> str:
        text = self._text(call)
        if text is None:
            return f"{REFUSED[0]}: there is no function {call.name} with these arguments"
        entry = self.entry
        results, _ = package.execute_multi_turn_func_call(
            [text],
            entry["initial_config"],
            entry["involved_classes"],
            name,
            entry["id"],
            long_context="long_context" in entry["id"],
        )
        return str(results[0])

    def num_right(self, calls: Sequence[Sequence[Sequence[ToolCall]]]) -> int:
        """Count the leading turns that the package's checker accepts. calls: by turn and step"""
        checker = _module("eval_checker.multi_turn_eval.multi_turn_checker")
        made = [[[text for text in map(self._text, step) if text] for step in turn] for turn in calls]
        made = [[step for step in turn if step] for turn in made]
        for n in range(1, len(made) + 1):
            with _new_objects() as (_, name):
                verdict = checker.multi_turn_checker(made[:n], self.truth[:n], self.entry, "", name)
            if not verdict["valid"]:
                return n - 1
        return len(made)

    def _text(self, call: ToolCall) -> str | None:
        """Return the call as Python for the package to evaluate; None for an unsafe one. The model wrote the
        call: only functions of the case may be named, and arguments are literals."""
        arguments = json.loads(call.arguments)
        known = any(each["name"] == call.name for each in self.functions)
        if not known or not all(map(str.isidentifier, arguments)):
            return None
        return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


def load_cases(category: str) -> dict[str, BfclCase]:
    """Cases by id. Raises: InvalidArgumentError without the package."""
    known = _module("constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
    types = _module("constants.type_mappings").GORILLA_TO_OPENAPI
    file = f"BFCL_v4_multi_turn_{category}.json"
    truths = {each["id"]: each["ground_truth"] for each in _lines("possible_answer", file)}
    functions = {
        name: _schema(list(_lines("multi_turn_func_doc", path)), types) for name, path in known.items()
    }
    return {
        entry["id"]: BfclCase(
            entry,
            truths[entry["id"]],
            [each for name in entry["involved_classes"] for each in functions[name]],
        )
        for entry in _lines(file)
    }


def most_steps() -> int:
    """Return the package's limit of steps with calls per turn."""
    return int(_module("constants.default_prompts").MAXIMUM_STEP_LIMIT)


@contextmanager
def _new_objects() -> Iterator[tuple[Any, str]]:
    """Yield the package's module that runs calls, and a name for new objects. It keeps them among its
    globals; they are removed at the end."""
    package = _module("eval_checker.multi_turn_eval.multi_turn_utils")
    name = f"session_{uuid4().hex}"
    try:
        yield package, name
    finally:
        for each in [each for each in vars(package) if each.startswith(name)]:
            delattr(package, each)


def _module(name: str) -> Any:
    return task_package(f"{PACKAGE}.{name}", BFCL, EXTRA)


def _lines(*path: str) -> Iterator[dict[str, Any]]:
    """Read the objects in a file of the package's data, one per line."""
    text = files(PACKAGE).joinpath("data", *path).read_text(encoding="utf-8")
    return (json.loads(line) for line in text.split("\n") if line)


def _schema(value: Any, types: Mapping[str, str]) -> Any:
    """Replace names of types by JSON Schema's."""
    if isinstance(value, list):
        return [_schema(each, types) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: types.get(each, "string") if key == "type" and isinstance(each, str) else _schema(each, types)
        for key, each in value.items()
    }
