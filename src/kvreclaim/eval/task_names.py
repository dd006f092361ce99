"""Names of tasks and what each measures; validated without torch or a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvreclaim import corpora
from kvreclaim.checks import check_known, require
from kvreclaim.eval.jsonl import read_questions
from kvreclaim.eval.packages import task_package
from kvreclaim.eval.plan import KNOWN, RULER, TaskOptions

OWN, CHUNKS = "own", "chunks"
GSM8K, REASONING_GYM, REASONING_EXTRA = "gsm8k", "reasoning-gym", "reasoning"
BFCL_CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
TEXTS: Mapping[str, Callable[[], corpora.Texts]] = MappingProxyType(
    {"prose": corpora.prose, "code": corpora.code}
)
"""The built-in texts."""
_PLACEMENTS = ("", KNOWN, CHUNKS)


@dataclass(frozen=True, slots=True)
class TaskKind:
    """Tasks with a common name before a colon.

    measures:  a description for people
    arguments: what may follow the colon; "" is the name alone, a word in capitals any text
    """

    measures: str
    arguments: Sequence[str] = ("",)

    def accepts(self, argument: str) -> bool:
        return argument in self.arguments or any(argument and word.isupper() for word in self.arguments)

    def forms(self, name: str) -> list[str]:
        """All spellings of it."""
        return [f"{name}:{argument}" if argument else name for argument in self.arguments]


TASK_KINDS: Mapping[str, TaskKind] = MappingProxyType(
    {
        "recall": TaskKind("one fact at the start, in the middle or at the end of the prompt, by turns"),
        "multi_query": TaskKind("several of many facts at once"),
        "variable_tracking": TaskKind("all variables of one of several chains of assignments"),
        "rsq": TaskKind("the stack after some steps of a depth-first walk", ("", "STEPS")),
        "chain": TaskKind("the demo model's own task: a walk along a chain of facts"),
        "needles": TaskKind("sentences at random places, questions in random order", _PLACEMENTS),
        "table": TaskKind("lines of a table in one place of the passage", _PLACEMENTS),
        "assignments": TaskKind("variables with values in two sentences that are far apart", _PLACEMENTS),
        "perplexity": TaskKind("perplexity of --text, of prose, or of code", ("", *TEXTS)),
        "agreement": TaskKind(
            "agreement with the full cache on --text (without one, on random tokens), prose, code, or the "
            "model's own continuations",
            ("", OWN, *TEXTS),
        ),
        "jsonl": TaskKind("questions of a JSONL file; answers must contain the expected text", ("PATH",)),
        "jsonl-exact": TaskKind("questions of a JSONL file; answers must equal the expected text", ("PATH",)),
        RULER: TaskKind("RULER: all 13 tasks, or one", ("", "TASK")),
        GSM8K: TaskKind("grade-school maths problems"),
        "agent_recorded": TaskKind("recorded turns of agents with tools"),
        "bfcl": TaskKind("function calls of the Berkeley leaderboard", ("", *BFCL_CATEGORIES)),
        "ifeval": TaskKind("instructions that a program can check"),
        REASONING_GYM: TaskKind("a task of the package reasoning-gym", ("TASK",)),
    }
)


GENERATED = (
    "recall",
    "multi_query",
    "variable_tracking",
    "rsq",
    "jsonl",
    "jsonl-exact",
    RULER,
    GSM8K,
    "ifeval",
)
"""Kinds with generated answers, each judged alone; also those of reasoning-gym."""


def check_generated(names: Sequence[str], options: TaskOptions) -> None:
    """Raises: InvalidArgumentError for a task that a server cannot answer."""
    kinds = (*GENERATED, REASONING_GYM)
    for name in names:
        require(
            name.partition(":")[0] in kinds,
            f"task {name!r} scores given answers, or compares with the full cache, which no server offers; "
            f"run it without --url, or take {', '.join(kinds)}.",
            field="tasks",
        )
        require(
            not name.startswith(RULER) or options.question == KNOWN,
            f"task {name!r} compresses the document before its question is known, which no server offers; "
            "pass --question known.",
            field="question",
        )


def check_tasks(names: Sequence[str], options: TaskOptions) -> list[str]:
    """Check names, and the files and packages that they need. Return them with "ruler" replaced by RULER's 13
    tasks.

    Raises: InvalidArgumentError for an unknown task, an unreadable file, or a missing package.
    """
    for name in names:
        kind, _, argument = name.partition(":")
        check_known("task", kind, TASK_KINDS, "tasks")
        require(
            TASK_KINDS[kind].accepts(argument) and not name.endswith(":"),
            f"task {name!r} is unknown; write {' or '.join(TASK_KINDS[kind].forms(kind))}.",
            field="tasks",
        )
        _check_argument(name, kind, argument, options)
    every = [f"{RULER}:{task}" for task in published_tasks()] if RULER in names else []
    return [each for name in names for each in (every if name == RULER else [name])]


def _check_argument(name: str, kind: str, argument: str, options: TaskOptions) -> None:
    if kind == "rsq" and argument:
        require(
            argument.isdecimal() and int(argument) >= 1,
            f"rsq:{argument} names no number of steps; write, for example, rsq:12.",
            "tasks",
        )
    if name == "perplexity":
        require(
            options.text is not None,
            "task perplexity needs a text; pass --text FILE, or perplexity:prose.",
            "tasks",
        )
    if name in ("perplexity", "agreement") and options.text is not None:
        require(
            options.text.is_file(),
            f"text is {str(options.text)!r}, which is no file; pass a text file.",
            "text",
        )
    if kind in ("jsonl", "jsonl-exact"):
        read_questions(Path(argument))
    if kind == RULER:
        known = published_tasks()
        require(
            argument in known or not argument,
            f"task {name!r} is unknown; RULER has {', '.join(known)}.",
            "tasks",
        )
    if kind == REASONING_GYM:
        package = task_package("reasoning_gym", name, REASONING_EXTRA)
        gym = sorted(set(package.factory.DATASETS) - {"composite"})
        require(argument in gym, f"task {name!r} is unknown; reasoning-gym has {', '.join(gym)}.", "tasks")


@cache
def published_tasks() -> dict[str, dict[str, Any]]:
    """RULER's tasks -> script ("task"), the script's arguments, template, answer prefix and answer length.
    Raises: InvalidArgumentError without the package."""
    require(
        find_spec("long_context_eval") is not None,
        "task ruler needs RULER's generators, which this environment lacks; run pip install "
        "'kvreclaim[ruler]'.",
    )
    import yaml
    from long_context_eval.data.synthetic.constants import TASKS

    tasks: dict[str, dict[str, Any]] = yaml.safe_load((ruler_folder() / "synthetic.yaml").read_text())
    return {name: task | TASKS[task["task"]] for name, task in tasks.items()}


def ruler_folder() -> Path:
    """Where RULER's package is installed."""
    import long_context_eval

    return Path(long_context_eval.__path__[0])
