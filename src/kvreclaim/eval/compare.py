"""The Python API of the evaluation: evaluate(llm, policies, budgets, tasks, ...) -> report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kvreclaim
from kvreclaim.compression_settings import AUTO
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.fingerprint import code_digest, run_identity
from kvreclaim.eval.grid import EvalGrid, OnEstimate, OnProgress, Runner
from kvreclaim.eval.journal import Journal
from kvreclaim.eval.plan import EvalPlan, TaskOptions
from kvreclaim.eval.remote import RemoteRunner, RemoteServer
from kvreclaim.eval.report import EvalReport, EvalRow, FormatFacts, ReportHeader
from kvreclaim.eval.rows import make_rows
from kvreclaim.eval.runner import BatchRunner, open_runners
from kvreclaim.eval.task import Task
from kvreclaim.eval.tasks import make_tasks

OnStart = Callable[[int], OnProgress]


def evaluate(
    llm: LLM,
    policies: Sequence[str],
    budgets: Sequence[float],
    tasks: Sequence[str | Task],
    *,
    options: TaskOptions | None = None,
    out: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> EvalReport:
    """Compare policies at equal bytes.

    Args:
        llm:      its pool must hold one sequence's full cache; more run at once if it holds more. For each
                  KV format that it does not have, a second engine with as many blocks is run
        policies: specs as in CompressionConfig.policy
        budgets:  shares of the full cache's bytes in the model's own dtype, in (0, 1]
        tasks:    names (tasks.make_tasks), or tasks of your own
        options:  sizes and files of the named tasks
        out:      directory of the journal; a call with the same arguments resumes
        settings: fields of EvalPlan: kv_cache_dtypes, seeds, num_examples, interval, sinks, recent, stats,
                  free_running, ...

    Raises: InvalidArgumentError before anything has run.
    """
    plan = EvalPlan(policies=policies, budgets=budgets, **settings)
    named = make_tasks([task for task in tasks if isinstance(task, str)], llm, options or TaskOptions())
    by_name = iter(named)
    every = [next(by_name) if isinstance(task, str) else task for task in tasks]
    return run_plan(llm, plan, every, out=None if out is None else Path(out))


def run_plan(
    llm: LLM,
    plan: EvalPlan,
    tasks: Sequence[Task],
    *,
    out: Path | None = None,
    command: str = "kvreclaim.eval.evaluate",
    on_start: OnStart | None = None,
    on_estimate: OnEstimate | None = None,
) -> EvalReport:
    """Run what is missing in the journal, and report everything.

    on_start: called with the number of examples of the whole grid; returns the callback of each batch
    on_estimate: called with the remaining seconds, after the first example
    """
    plan = plan.resolved(llm)
    runners = open_runners(llm, plan)
    identities = {name: run_identity(each.llm, plan, each.stats) for name, each in runners.items()}
    rows = _rows(runners, identities, plan, tasks, out, on_start, on_estimate)
    return EvalReport(header=_header(llm, runners, plan, tasks, command), rows=rows)


def run_server(
    server: RemoteServer,
    plan: EvalPlan,
    tasks: Sequence[Task],
    *,
    out: Path | None = None,
    command: str = "kvreclaim.eval.compare.run_server",
    on_start: OnStart | None = None,
    on_estimate: OnEstimate | None = None,
) -> EvalReport:
    """Run what is missing in the journal on a server, as run_plan does. tasks: of remote_tasks"""
    runner = RemoteRunner(server, plan)
    identity = {"version": kvreclaim.__version__, "code": code_digest(), **runner.identity}
    rows = _rows({AUTO: runner}, {AUTO: identity}, plan, tasks, out, on_start, on_estimate)
    return EvalReport(
        header=ReportHeader(
            command=command,
            version=kvreclaim.__version__,
            model=server.model,
            url=server.url,
            seeds=list(plan.seeds),
            num_examples=plan.num_examples,
            tasks={task.name: dict(task.identity) for task in tasks},
        ),
        rows=rows,
    )


def _rows(
    runners: Mapping[str, Runner],
    identities: Mapping[str, dict[str, Any]],
    plan: EvalPlan,
    tasks: Sequence[Task],
    out: Path | None,
    on_start: OnStart | None,
    on_estimate: OnEstimate | None,
) -> list[EvalRow]:
    with Journal(out) as journal:
        grid = EvalGrid(runners, identities, plan, tasks, journal)
        if on_start is not None:
            grid.on_progress = on_start(grid.num_examples)
        if on_estimate is not None:
            grid.on_estimate = on_estimate
        grid.run()
        storages = {name: runner.storage for name, runner in runners.items()}
        return make_rows(plan, tasks, grid.cells(), grid.problems(), storages)


def _header(
    llm: LLM, runners: Mapping[str, BatchRunner], plan: EvalPlan, tasks: Sequence[Task], command: str
) -> ReportHeader:
    facts, first = llm.loaded.facts, next(iter(runners.values()))
    return ReportHeader(
        command=command,
        version=kvreclaim.__version__,
        model=facts.name,
        fingerprint=facts.fingerprint,
        dtype=str(facts.dtype).removeprefix("torch."),
        device=facts.device.type,
        kernels=first.llm.engine.kernels,
        block_size=llm.engine.config.block_size,
        kv_bytes_per_token=first.storage.reference_bytes,
        kv_formats=[
            FormatFacts(
                name=runner.storage.name,
                bytes_per_token=runner.storage.token_bytes,
                kernels=runner.llm.engine.kernels,
            )
            for runner in runners.values()
        ],
        seeds=list(plan.seeds),
        num_examples=plan.num_examples,
        tasks={task.name: dict(task.identity) for task in tasks},
        **plan.shared,
    )
