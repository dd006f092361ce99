"""Makes tasks from their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kvreclaim.checks import require
from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.agreement import Agreement
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.eval.jsonl import JsonlTask, read_questions
from kvreclaim.eval.passages import Passages
from kvreclaim.eval.plan import KNOWN, TaskOptions
from kvreclaim.eval.ruler.task import ruler_tasks
from kvreclaim.eval.task import SampledTask, Task
from kvreclaim.eval.task_names import CHUNKS, GSM8K, OWN, REASONING_GYM, TEXTS, check_tasks
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
NUM_CHUNKS = 8
NUM_SCORED = 512
"""Scored tokens of a window of a built-in text with at least twice as many tokens."""
JSONL_TOKENS = 256


def make_tasks(names: Sequence[str], llm: LLM, options: TaskOptions) -> list[Task]:
    """Make the tasks of these names for a model.

    names: those of task_names.TASK_KINDS. "rsq:12" sets the steps, "needles:known" puts the question before
    the compression, "needles:chunks" makes reusable documents

    Raises: InvalidArgumentError for an unknown name or a missing requirement of a task.
    """
    names = check_tasks(names, options)
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
    """Whether tasks use the demo model's vocabulary. Raises: InvalidArgumentError if they cannot."""
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
    if kind == "perplexity":
        return Perplexity(_windows(argument, llm, options), name)
    if kind == "agreement":
        if argument == OWN:
            return Agreement(OwnTraces(llm, _built_in("prose", llm), options.num_tokens), name)
        if not argument and options.text is None:
            return Agreement(RandomWindows(llm.loaded.vocab_size, options.num_tokens), name)
        return Agreement(_windows(argument, llm, options), name)
    if kind in (GSM8K, REASONING_GYM):
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
    if kind in ("jsonl", "jsonl-exact"):
        return _jsonl(name, Path(argument), llm, options)
    is_demo = uses_demo(llm, options.dialect)
    if is_demo and name in DEMO_TASKS:
        return TraceTask(name, options.num_tokens)
    if not is_demo and kind in TEXT_TASKS:
        return _text(kind, argument, llm, options)
    if not is_demo and kind in FORCED_TASKS:
        return _forced(kind, llm, options, argument)
    own, dialect = ((*DEMO_TASKS,), "demo") if is_demo else ((*TEXT_TASKS, *FORCED_TASKS), "text")
    raise InvalidArgumentError(
        f"task {name!r} is not one of the {dialect} dialect, which has {', '.join(own)}; pass one of them, "
        "or another --dialect.",
        field="tasks",
    )


def _windows(name: str, llm: LLM, options: TaskOptions) -> TextWindows:
    """Windows of a built-in text, or of the file in the options."""
    if name:
        scored = min(NUM_SCORED, options.num_tokens // 2)
        return TextWindows(_built_in(name, llm), options.num_tokens, scored)
    assert options.text is not None, "checked by the caller"
    return TextWindows(Passages.read(llm.tokenizer, options.text), options.num_tokens)


def _built_in(name: str, llm: LLM) -> Passages:
    """The part of a text that is not used by calibration."""
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
        steps = int(argument or DEFAULT_STEPS)
        task: TextTask = TextRSQ(encode, options.num_tokens, most or 64 * (steps + 2), steps=steps)
    else:
        make: Callable[..., TextTask] = TEXT_TASKS[kind]
        task = make(encode, options.num_tokens, most or 128)
    task.item(0, 0)
    return task
