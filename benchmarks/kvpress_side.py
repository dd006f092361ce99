"""kvpress' side of compare_kvpress.py: its columns, its process and its results."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvreclaim.compression_settings import AUTO, FULL
from kvreclaim.errors import KVReclaimError
from kvreclaim.eval.grid import OnProgress
from kvreclaim.eval.journal import Journal, cell_key
from kvreclaim.eval.plan import EvalPlan, GridColumn
from kvreclaim.eval.results import Result
from kvreclaim.eval.rows import Cells, Problem
from kvreclaim.eval.task import Answer, Item, Task, TaskScore
from kvreclaim.memory.blocks import blocks_for

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
        """Ask for what is missing. A press that cannot run on a task is not asked again."""
        missing, started = self.missing(), time.perf_counter()
        for number, (task, index, columns) in enumerate(missing):
            item = task.item(0, index)
            asked = [column for column in columns if (column, task.name) not in self.problems]
            on_progress(f"{task.name} {index}", len(columns) - len(asked))
            for column, answer in worker.answers(item, asked) if asked else ():
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
