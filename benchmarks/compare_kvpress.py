"""kvreclaim beside NVIDIA's kvpress: the same model, rows of RULER and shares of the context's keys.

    make compare-kvpress MODEL=DIR

Prompts and points are those of `kvreclaim eval --tasks ruler`. kvpress reads the same token ids
in the same dtype, in an environment of its own (kvpress_worker.py). Both run on the GPU, if there is one, and
keep their results in the journal of --out.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from benchmarks.runner import command
from kvreclaim import LLM
from kvreclaim.bench.common import wide_console
from kvreclaim.bench.plans import THREADS
from kvreclaim.checks import require
from kvreclaim.cli.bench_options import command_line, ready
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.compression_settings import AUTO, FULL
from kvreclaim.errors import KVReclaimError
from kvreclaim.eval.budget import FormatStorage
from kvreclaim.eval.compare import run_plan
from kvreclaim.eval.grid import OnProgress
from kvreclaim.eval.journal import Journal, cell_key
from kvreclaim.eval.plan import RULER, EvalPlan, GridColumn, TaskOptions
from kvreclaim.eval.report import EvalReport, EvalRow
from kvreclaim.eval.results import Result
from kvreclaim.eval.rows import Cells, Problem, make_rows
from kvreclaim.eval.show import progress_bar, show_estimate, show_report
from kvreclaim.eval.task import Answer, Item, PlainTask, Task, TaskScore
from kvreclaim.eval.tasks import make_tasks
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model.gguf import convert_gguf
from kvreclaim.model_paths import moved
from kvreclaim.options import check_options, option

BESIDE = 256
"""Tokens beyond num_tokens: the chat template, the question and the longest answer."""
WORKER = Path(__file__).with_name("kvpress_worker.py")
KVPRESS = "kvpress "
COUNTS = ("blocks_freed", "blocks_perfect", "tokens_evicted", "compactions", "preemptions")
"""What a row of ours counts and kvpress does not."""


@dataclass(frozen=True, slots=True)
class PressColumn(GridColumn):
    """A press at a share of the context's keys; it is compared with kvpress' own full cache."""

    @property
    def is_full(self) -> bool:
        return self.policy == KVPRESS + FULL

    @property
    def evicts(self) -> bool:
        return False  # no block of ours, by whose counts rows are checked

    @property
    def cell(self) -> tuple[str, float]:
        """As the worker names it."""
        return self.policy.removeprefix(KVPRESS), self.fraction


@dataclass(frozen=True, kw_only=True)
class PressPlan(EvalPlan):
    """The columns of kvpress."""

    presses: Sequence[str] = ()

    def settings(self) -> list[GridColumn]:
        return [
            PressColumn(KVPRESS + press, float(fraction), AUTO)
            for press in self.presses
            for fraction in ((1.0,) if press == FULL else self.budgets)
        ]


class Worker:
    """kvpress in its own environment: one model, one row at a time."""

    def __init__(self, python: Path, model: Path, dtype: str, threads: int) -> None:
        command = [python, WORKER, "--model", model, "--dtype", dtype]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def answers(self, item: Item, columns: Sequence[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """An answer for each column, as they come. Raises: KVReclaimError where the worker has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        by_cell = {column.cell: column for column in columns}
        row = {name: getattr(item, name) for name in ("prompt", "compress_at", "max_new_tokens")}
        stdin.write(json.dumps(row | {"cells": list(by_cell)}) + "\n")
        stdin.flush()
        for _ in columns:
            if not (line := stdout.readline()):
                raise KVReclaimError(f"kvpress ended with status {self._process.wait()}; its error is above.")
            answer = json.loads(line)
            yield by_cell[answer["press"], answer["share"]], answer


@dataclass(eq=False)
class PressGrid:
    """kvpress' side, half done or done.

    about: what decides every result besides column and task
    """

    plan: PressPlan
    tasks: Sequence[Task]
    journal: Journal
    about: Mapping[str, Any]
    block_size: int
    problems: dict[tuple[GridColumn, str], Problem] = field(default_factory=dict, init=False)

    def missing(self) -> list[tuple[Task, int, list[GridColumn]]]:
        """What is not in the journal, row by row."""
        rows = [
            (task, index, [c for c in self.plan.settings() if index not in self._done(c, task)])
            for task in self.tasks
            for index in range(task.num_examples(self.plan.num_examples))
        ]
        return [row for row in rows if row[2]]

    def run(self, worker: Worker, on_progress: OnProgress, on_estimate: Callable[[float], None]) -> None:
        """Run the missing cells. A press that cannot run on a task is not tried again."""
        missing, started = self.missing(), time.perf_counter()
        for number, (task, index, columns) in enumerate(missing):
            item = task.item(0, index)
            runnable = [column for column in columns if (column, task.name) not in self.problems]
            on_progress(f"{task.name} {index}", len(columns) - len(runnable))
            for column, answer in worker.answers(item, runnable) if runnable else ():
                if "refused" in answer:
                    self.problems[column, task.name] = Problem("refused", answer["refused"])
                else:
                    score = task.judge(item, Answer(text=answer["text"]))
                    about = self._about(column, task)
                    result = self._result(item, score, answer)
                    self.journal.append(cell_key(about), about, [(index, result)])
                on_progress(f"{task.name}: {column.label}", 1)
            if number == 0:
                on_estimate((time.perf_counter() - started) * (len(missing) - 1))

    def cells(self) -> Cells:
        cells: Cells = {}
        for task in self.tasks:
            wanted = range(task.num_examples(self.plan.num_examples))
            for column in self.plan.settings():
                done = self._done(column, task)
                cells[column, task.name] = {0: [done[index] for index in wanted if index in done]}
        return cells

    def _done(self, column: GridColumn, task: Task) -> Mapping[int, Result]:
        return self.journal.of(cell_key(self._about(column, task)))

    def _about(self, column: GridColumn, task: Task) -> dict[str, Any]:
        of_task = {"task": task.name, "identity": dict(task.identity)}
        return {**self.about, "policy": column.policy, "fraction": column.fraction, **of_task}

    def _result(self, item: Item, score: TaskScore, answer: Mapping[str, Any]) -> Result:
        """kvpress holds tokens, not blocks; they are counted as blocks that hold as many."""
        return Result(
            points=score.points,
            out_of=score.out_of,
            extra={name: answer[name] for name in ("kept", "prompt_s")},
            num_tokens=item.num_tokens,
            budget=round(answer["kept"] * item.num_tokens),
            full_blocks=blocks_for(item.num_tokens, self.block_size),
            answer_blocks=blocks_for(round(answer["kv_tokens"]), self.block_size),
            peak_blocks=blocks_for(len(item.prompt), self.block_size),
            timed_tokens=answer["num_generated"],
            elapsed_s=answer["answer_s"],
            generated=True,
            **dict.fromkeys(COUNTS, 0),
        )


@dataclass(frozen=True, kw_only=True)
class ComparePlan:
    """Policies and presses at the same shares."""

    model: Path = option(Path(), "Model directory or .gguf file.")
    tasks: tuple[str, ...] = option((RULER,), "Tasks, comma-separated: ruler, or some, such as ruler:vt.")
    num_tokens: int = option(4096, "RULER's length in tokens.", low=256)
    num_examples: int = option(1, "Examples per task.", low=1)
    policies: tuple[str, ...] = option((FULL, AUTO), "kvreclaim's policies, comma-separated.")
    presses: tuple[str, ...] = option((), "Presses of kvpress, comma-separated; without it, all of them.")
    budgets: tuple[float, ...] = option((0.2, 0.1), "Shares of the context's keys, comma-separated.")
    sinks: int = option(4, "First tokens that kvreclaim's policies keep.", low=0)
    recent: int = option(64, "Newest tokens that kvreclaim's policies keep.", low=0)
    batch_size: int = option(
        1, "Examples that kvreclaim answers together; kvpress takes one at a time.", low=1
    )
    dtype: str = option("float32", "Dtype of both.", choices=("float32", "bfloat16", "float16"))
    threads: int = option(2, THREADS, low=1, high=1024)
    kvpress_python: Path = option(
        Path(".kvpress-env/bin/python"), "Interpreter of kvpress' environment (`make kvpress-env`)."
    )
    out: Path = option(Path("eval_out/kvpress"), "Directory of the journal and the report.")

    def __post_init__(self) -> None:
        check_options(self)
        require(
            all(budget <= 1 for budget in self.budgets),
            f"--budgets is {', '.join(map(str, self.budgets))}; presses take shares, above 0 and up to 1.",
        )
        require(
            (self.model / "config.json").is_file() or (self.model.suffix == ".gguf" and self.model.is_file()),
            f"--model is {str(self.model)!r}; name a model directory or a .gguf file.",
        )
        require(
            self.kvpress_python.is_file(),
            f"--kvpress-python is {str(self.kvpress_python)!r}, which is missing; run `make kvpress-env`, "
            "or name the Python of another environment that has kvpress.",
        )

    def grid(self, kind: Callable[..., EvalPlan] = EvalPlan, **more: Any) -> Any:
        """The grid of one side. The interval leaves room for question and answer: kvpress compresses once."""
        names = ("policies", "budgets", "num_examples", "batch_size", "sinks", "recent")
        shared = {name: getattr(self, name) for name in names}
        return kind(**shared, interval=BESIDE, **more)


@dataclass(frozen=True, slots=True)
class ContextItem(Item):
    """An example whose budget is a share of its context, like that of a press."""

    @property
    def num_tokens(self) -> int:
        assert self.compress_at is not None, "ContextTask has checked it"
        return self.compress_at


@dataclass(frozen=True)
class ContextTask(PlainTask):
    """A task of RULER with budgets over the context alone."""

    task: Any
    suite = RULER

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def identity(self) -> Mapping[str, Any]:
        return {**self.task.identity, "budget": "of the context"}

    def num_examples(self, wanted: int) -> int:
        return self.task.num_examples(wanted)

    def item(self, seed: int, index: int) -> ContextItem:
        """Raises: InvalidArgumentError for a prompt without a question that follows the context."""
        item = self.task.item(seed, index)
        require(item.compress_at is not None, f"task {self.name} compresses no context; take tasks of ruler.")
        return ContextItem(*(getattr(item, each.name) for each in fields(Item)))

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        return self.task.judge(item, answer)


def chosen_presses(plan: ComparePlan) -> tuple[str, list[str]]:
    """kvpress' version, and the presses of the plan. Raises: KVReclaimError."""
    done = subprocess.run([plan.kvpress_python, WORKER], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVReclaimError(f"{plan.kvpress_python} cannot run kvpress: {done.stderr.strip()[-300:]}")
    has = json.loads(done.stdout)
    for press in plan.presses:
        require(
            press in has["presses"], f"press {press!r} is unknown; known are {', '.join(has['presses'])}."
        )
    return has["version"], list(plan.presses or has["presses"])


def compare(plan: ComparePlan) -> EvalReport:
    """Both sides in one report, kvreclaim's first."""
    version, presses = chosen_presses(plan)
    longest, console = plan.num_tokens + BESIDE, wide_console(stderr=True)
    llm = LLM(
        plan.model,
        dtype=plan.dtype,
        num_blocks=2 * (longest // 16 + 2) * plan.batch_size,
        max_num_seqs=plan.batch_size,
        max_num_batched_tokens=longest,
    )
    options = TaskOptions(num_tokens=plan.num_tokens)
    tasks = [ContextTask(task) for task in make_tasks(plan.tasks, llm, options)]
    with progress_bar(console) as on_start:
        report = run_plan(
            llm,
            plan.grid(),
            tasks,
            out=plan.out,
            command=command_line(),
            on_start=on_start,
            on_estimate=lambda seconds: show_estimate(console, seconds),
        )
    storages = {AUTO: FormatStorage.of(AUTO, llm.engine.groups.facts, report.header.block_size)}
    del llm
    side, about = (
        plan.grid(PressPlan, presses=presses),
        {"kvpress": version, "model": report.header.fingerprint, "dtype": plan.dtype},
    )
    with ExitStack() as stack:
        journal = stack.enter_context(Journal(plan.out))
        grid = PressGrid(side, tasks, journal, about, report.header.block_size)
        if missing := grid.missing():
            weights = weights_of(plan.model, plan.out)
            worker = stack.enter_context(Worker(plan.kvpress_python, weights, plan.dtype, plan.threads))
            on_start = stack.enter_context(progress_bar(console))
            on_progress = on_start(sum(len(columns) for _, _, columns in missing))
            grid.run(worker, on_progress, lambda seconds: show_estimate(console, seconds))
        rows = make_rows(side, tasks, grid.cells(), grid.problems, storages)
    ours = [row.model_copy(update={"extra": row.extra | kept(row)}) for row in report.rows]
    both = [*ours, *(row.model_copy(update=dict.fromkeys(COUNTS)) for row in rows)]
    order = report.tasks
    return EvalReport(header=report.header, rows=sorted(both, key=lambda row: order.index(row.task)))


def kept(row: EvalRow) -> dict[str, float]:
    """The share of the context's keys that a row of ours keeps."""
    return {"kept": row.budget / row.num_tokens} if row.budget and row.num_tokens else {}


def weights_of(model: Path, out: Path) -> Path:
    """A directory that transformers loads; a GGUF file is converted once."""
    if model.is_dir():
        return model
    target = out / model.stem
    if not target.is_dir():
        with TemporaryDirectory(dir=out) as made:
            convert_gguf(model, Path(made) / "model", print)
            moved(Path(made) / "model", target)
    return target


@command
def compare_kvpress(plan: Annotated[ComparePlan, ConfigOptions(config=ComparePlan)]) -> None:
    """Compare kvreclaim's policies with kvpress' presses on RULER."""
    with ready(plan.threads):
        report = compare(plan)
        show_report(wide_console(), report)
        report.write_json(plan.out / "report.json")
