"""From the name of a task to the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kvreclaim import corpora as texts
from kvreclaim.checks import require
from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.agreement import Agreement
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.eval.jsonl import JsonlTask, read_questions
from kvreclaim.eval.passages import Passages
from kvreclaim.eval.plan import KNOWN, TaskOptions
from kvreclaim.eval.ruler.task import ruler_tasks, spell_out
from kvreclaim.eval.task import SampledTask, Task
from kvreclaim.eval.text.base import TextTask
from kvreclaim.eval.text.codes import TextMultiQuery, TextRecall
from kvreclaim.eval.text.forced import ForcedTask
from kvreclaim.eval.text.needles import Assignments, CodeTable, Needles
from kvreclaim.eval.text.prose import Encoder
from kvreclaim.eval.text.variables import TextVariableTracking
from kvreclaim.eval.text.walk import DEFAULT_STEPS, TextRSQ
from kvreclaim.eval.traces import OwnTraces, TraceTask, knows_demo_vocabulary
from kvreclaim.eval.windows import Perplexity, RandomWindows, TextWindows

TEXT_TASKS: Mapping[str, type[TextTask]] = MappingProxyType(
    {
        "recall": TextRecall,
        "multi_query": TextMultiQuery,
        "variable_tracking": TextVariableTracking,
        "rsq": TextRSQ,
    }
)
FORCED_TASKS: Mapping[str, type[ForcedTask]] = MappingProxyType(
    {"needles": Needles, "table": CodeTable, "assignments": Assignments}
)
CHUNKS = "chunks"
NUM_CHUNKS = 8
TEXTS: Mapping[str, Callable[[], texts.Texts]] = MappingProxyType({"prose": texts.prose, "code": texts.code})
OWN = "own"
NUM_SCORED = 512
"""Scored tokens of a window of a built-in text, where it has twice as many tokens."""
ANY_MODEL: Mapping[str, str] = MappingProxyType(
    {
        **{f"perplexity[:{name}]": f"perplexity of {name}" for name in TEXTS},
        **{f"agreement[:{name}]": f"agreement with the full cache on {name}" for name in TEXTS},
        f"agreement[:{OWN}]": "agreement with the full cache on the model's own continuations",
        "jsonl:PATH": "questions of a JSONL file; an answer must contain the expected text",
        "jsonl-exact:PATH": "questions of a JSONL file; an answer must equal the expected text",
        "ruler[:TASK]": "RULER, all 13 tasks or one",
        "gsm8k": "grade-school maths problems",
        "agent_recorded": "recorded turns of agents with tools",
        "bfcl[:CATEGORY]": "function calls of the Berkeley leaderboard",
        "ifeval": "instructions that a program can check",
        "reasoning-gym:TASK": "a task of reasoning-gym",
    }
)
"""Tasks of models with any vocabulary, and what they measure."""
JSONL_TOKENS = 256


def make_tasks(names: Sequence[str], llm: LLM, options: TaskOptions) -> list[Task]:
    """The tasks of these names for a model.

    Names: those of DEMO_TASKS, or of TEXT_TASKS ("rsq:12" sets the steps) and FORCED_TASKS ("needles:known":
    the question stands before the compression; "needles:chunks": documents that may be reused), by dialect;
    ANY_MODEL. "ruler" stands for all tasks of RULER.
    Raises: InvalidArgumentError for an unknown name and for what a task lacks.
    """
    names = spell_out(names)
    made: dict[str, Task] = {**ruler_tasks(names, llm, options)}
    tasks = [made.get(name) or _make(name, llm, options) for name in names]
    for task in tasks:
        require(
            not options.temperature or isinstance(task, SampledTask),
            f"temperature is {options.temperature}, but task {task.name} is judged without sampling; leave "
            "temperature out, or run gsm8k and reasoning-gym alone.",
        )
    return tasks


def uses_demo(llm: LLM, dialect: str) -> bool:
    """Whether tasks speak the demo model's vocabulary. Raises: InvalidArgumentError where they cannot."""
    tokenizer = llm.loaded.tokenizer
    known = tokenizer is not None and knows_demo_vocabulary(tokenizer.get_vocab())
    if dialect == "demo" and not known:
        raise InvalidArgumentError(
            f"dialect is 'demo', but the tokenizer of {llm.loaded.facts.name} has another vocabulary than "
            "the demo model's; use --dialect text."
        )
    return known if dialect == "auto" else dialect == "demo"


def _make(name: str, llm: LLM, options: TaskOptions) -> Task:
    kind, _, argument = name.partition(":")
    if kind == "perplexity" and argument in ("", *TEXTS):
        if not argument and options.text is None:
            raise InvalidArgumentError("task perplexity needs a text; pass --text FILE, or perplexity:prose.")
        return Perplexity(_windows(argument, llm, options), name)
    if kind == "agreement" and argument in ("", OWN, *TEXTS):
        if argument == OWN:
            return Agreement(OwnTraces(llm, _built_in("prose", llm), options.num_tokens), name)
        if not argument and options.text is None:
            return Agreement(RandomWindows(llm.loaded.vocab_size, options.num_tokens), name)
        return Agreement(_windows(argument, llm, options), name)
    if name == "gsm8k" or (kind == "reasoning-gym" and argument):
        from kvreclaim.eval.reasoning import reasoning_task

        return reasoning_task(name, llm, options)
    if name == "ifeval":
        from kvreclaim.eval.ifeval import ifeval_task

        return ifeval_task(llm, options)
    if name == "agent_recorded":
        from kvreclaim.eval.agents import agent_task

        return agent_task(llm, options)
    if kind == "bfcl":
        from kvreclaim.eval.bfcl import bfcl_task

        return bfcl_task(name, llm, options)
    if kind in ("jsonl", "jsonl-exact") and argument:
        return _jsonl(name, Path(argument), llm, options)
    if uses_demo(llm, options.dialect):
        if name in DEMO_TASKS:
            return TraceTask(name, options.num_tokens)
    elif kind in TEXT_TASKS and (not argument or kind == "rsq"):
        return _text(kind, argument, llm, options)
    elif kind in FORCED_TASKS and argument in ("", KNOWN, CHUNKS):
        return _forced(kind, llm, options, argument)
    known = DEMO_TASKS if uses_demo(llm, options.dialect) else (*TEXT_TASKS, *FORCED_TASKS)
    dialect = "demo" if uses_demo(llm, options.dialect) else "text"
    raise InvalidArgumentError(
        f"task {name!r} is unknown in the {dialect} dialect; known are {', '.join((*known, *ANY_MODEL))}."
    )


def _windows(name: str, llm: LLM, options: TaskOptions) -> TextWindows:
    """Windows of a built-in text, or of the file in the options."""
    if name:
        scored = min(NUM_SCORED, options.num_tokens // 2)
        return TextWindows(_built_in(name, llm), options.num_tokens, scored)
    assert options.text is not None, "checked by the caller"
    return TextWindows(Passages.read(llm.tokenizer, options.text), options.num_tokens)


def _built_in(name: str, llm: LLM) -> Passages:
    """The part of a text that no calibration reads."""
    return Passages.of(llm.tokenizer, TEXTS[name]().evaluation)


def _forced(kind: str, llm: LLM, options: TaskOptions, argument: str) -> ForcedTask:
    task = FORCED_TASKS[kind](
        llm.tokenizer,
        _built_in("prose", llm),
        options.num_tokens,
        known=argument == KNOWN,
        num_chunks=NUM_CHUNKS if argument == CHUNKS else 0,
    )
    task.item(0, 0)
    return task


def _jsonl(name: str, path: Path, llm: LLM, options: TaskOptions) -> JsonlTask:
    return JsonlTask(
        name=name,
        encode=Encoder(llm.tokenizer),
        questions=read_questions(path),
        max_new_tokens=options.max_new_tokens or JSONL_TOKENS,
        exact=name.startswith("jsonl-exact:"),
    )


def _text(kind: str, argument: str, llm: LLM, options: TaskOptions) -> TextTask:
    encode, most = Encoder(llm.tokenizer), options.max_new_tokens
    if kind == "rsq":
        steps = _steps(argument)
        task: TextTask = TextRSQ(encode, options.num_tokens, most or 64 * (steps + 2), steps=steps)
    else:
        make: Callable[..., TextTask] = TEXT_TASKS[kind]
        task = make(encode, options.num_tokens, most or 128)
    task.item(0, 0)
    return task


def _steps(argument: str) -> int:
    if not argument:
        return DEFAULT_STEPS
    if not argument.isdecimal() or int(argument) < 1:
        raise InvalidArgumentError(f"rsq:{argument} names no number of steps; write, for example, rsq:12.")
    return int(argument)
