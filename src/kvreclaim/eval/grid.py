"""Runs the grid batch by batch and stores the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvreclaim.compression_settings import FULL
from kvreclaim.errors import InvalidArgumentError, KVReclaimError
from kvreclaim.eval.budget import FormatStorage
from kvreclaim.eval.fingerprint import cell_identity
from kvreclaim.eval.journal import Journal, cell_key
from kvreclaim.eval.plan import EvalPlan, GridColumn
from kvreclaim.eval.requests import CellError
from kvreclaim.eval.results import Result
from kvreclaim.eval.rows import Cells, Problem
from kvreclaim.eval.task import Item, Task


class Runner(Protocol):
    """Runs batches of examples on one engine."""

    @property
    def storage(self) -> FormatStorage | None:
        """None if the bytes are unknown."""
        ...

    def batch_size(self, task: Task, items: Sequence[Item]) -> int:
        """Examples of these that run at once."""
        ...

    def run(self, task: Task, items: Sequence[Item], setting: GridColumn) -> list[Result]:
        """Judge every item. Raises: KVReclaimError; CellError if a request failed."""
        ...


OnProgress = Callable[[str, int], None]
OnEstimate = Callable[[float], None]


@dataclass(eq=False)
class EvalGrid:
    """A plan on a model, in progress or finished.

    runners:     by KV format
    identities:  likewise: the parts of cells' identities that a run shares
    on_progress: called with (current work, finished examples)
    on_estimate: called with the remaining seconds, after the first example under all settings
    """

    runners: Mapping[str, Runner]
    identities: Mapping[str, dict[str, Any]]
    plan: EvalPlan
    tasks: Sequence[Task]
    journal: Journal
    on_progress: OnProgress = lambda label, advance: None
    on_estimate: OnEstimate = lambda seconds: None
    _problems: dict[tuple[GridColumn, str], Problem] = field(default_factory=dict, init=False)
    _estimated: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) < len(names):
            raise InvalidArgumentError(f"tasks are {', '.join(names) or 'none'}; name each task once.")

    @property
    def num_examples(self) -> int:
        """Examples of all cells."""
        by_task = (len(self._wanted(task)) * len(self._seeds(task)) for task in self.tasks)
        return len(self.plan.settings()) * sum(by_task)

    def run(self) -> None:
        """Run what is missing in the journal. All settings run a batch before the next one starts, so that an
        unfinished run is comparable. The first batch is a single example, for an early estimate."""
        for task in self.tasks:
            for seed in self._seeds(task):
                for numbers, items in self._batches(task, seed, self._wanted(task)):
                    batch, started = dict(zip(numbers, items, strict=True)), time.perf_counter()
                    settings = self.plan.settings()
                    num_run = sum(self._run_batch(setting, task, seed, batch) for setting in settings)
                    if num_run and not self._estimated:
                        self._estimated = True
                        self.on_estimate((time.perf_counter() - started) / num_run * self._num_left)

    @property
    def _num_left(self) -> int:
        done = (results for by_seed in self.cells().values() for results in by_seed.values())
        return self.num_examples - sum(map(len, done))

    def cells(self) -> Cells:
        """Results of every (setting, task) of the plan, by seed and example."""
        found: Cells = {}
        for task in self.tasks:
            for setting in self.plan.settings():
                by_seed: dict[int, list[Result]] = {}
                for seed in self._seeds(task):
                    done = self.journal.of(cell_key(self._about(self._as_run(setting), task, seed)))
                    by_seed[seed] = [done[index] for index in self._wanted(task) if index in done]
                found[setting, task.name] = by_seed
        return found

    def problems(self) -> dict[tuple[GridColumn, str], Problem]:
        """Problems of the columns that failed to run, or ran incorrectly."""
        return {
            (setting, task.name): problem
            for task in self.tasks
            for setting in self.plan.settings()
            if (problem := self._problems.get((self._as_run(setting), task.name))) is not None
        }

    def _as_run(self, setting: GridColumn) -> GridColumn:
        """Replace a policy that would never compress, because the format alone meets the budget, by the full
        cache."""
        storage = self.runners[setting.kv_cache_dtype].storage
        alone = storage is not None and storage.meets(setting.fraction)
        return replace(setting, policy=FULL, budget=1.0) if alone else setting

    def _wanted(self, task: Task) -> range:
        return range(task.num_examples(self.plan.num_examples))

    def _seeds(self, task: Task) -> Sequence[int]:
        return self.plan.seeds if task.seeded else self.plan.seeds[:1]

    def _batches(self, task: Task, seed: int, wanted: range) -> Iterator[tuple[range, list[Item]]]:
        first = wanted.start
        while first < wanted.stop:
            most = self.plan.batch_size if self._estimated else 1
            numbers = range(first, min(first + most, wanted.stop))
            items = [task.item(seed, index) for index in numbers]
            size = min(runner.batch_size(task, items) for runner in self.runners.values())
            yield numbers[:size], items[:size]
            first = numbers[:size].stop

    def _run_batch(self, setting: GridColumn, task: Task, seed: int, items: dict[int, Item]) -> int:
        """Run the examples missing in the journal. Returns: their number."""
        label = f"{task.name}: {setting.label}"
        setting = self._as_run(setting)
        about = self._about(setting, task, seed)
        key = cell_key(about)
        missing = [index for index in items if index not in self.journal.of(key)]
        self.on_progress(label, 0)
        if missing and (setting, task.name) not in self._problems:
            try:
                runner = self.runners[setting.kv_cache_dtype]
                results = runner.run(task, [items[index] for index in missing], setting)
                self.journal.append(key, about, list(zip(missing, results, strict=True)))
            except CellError as error:
                self._problems[setting, task.name] = Problem("error", str(error))
            except KVReclaimError as error:
                self._problems[setting, task.name] = Problem("refused", str(error))
        self.on_progress(label, len(items))
        return len(missing)

    def _about(self, setting: GridColumn, task: Task, seed: int) -> dict[str, Any]:
        run = self.identities[setting.kv_cache_dtype]
        first = self.identities[self.plan.kv_cache_dtypes[0]]
        return cell_identity(run, first, self.plan, setting, task, seed)
