"""`kvreclaim eval`: policies x budgets x KV formats x tasks, in one table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreclaim.cli import options as opt
from kvreclaim.cli.bench_options import command_line, formats_in
from kvreclaim.cli.takes import Takes, takes
from kvreclaim.config import CompressionSettings, EngineConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for

if TYPE_CHECKING:
    from rich.console import Console

    from kvreclaim import LLM
    from kvreclaim.eval import EvalPlan, EvalReport, Task

DEFAULT_POLICIES = "full,streaming_llm,knorm,triattention,query_mixture"
DEFAULT_TASKS = "recall,multi_query,variable_tracking,rsq"
GRID, TASKS, OUTPUT = "grid", "tasks", "output"
Files = Mapping[str, Path | None]
ENGINE = ("kernels", "block_size", "max_num_batched_tokens", "max_model_len", "enforce_eager")


def _option(panel: str, *names: str, **facts: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **facts)


@takes
def evaluate(
    shared: Annotated[
        dict[str, Any],
        Takes(
            config=CompressionSettings,
            panel=opt.COMPRESSION,
            without=("policy", "budget"),
            defaults={"recent": 64},
            own_names=True,
            build=dict,
        ),
    ],
    engine: Annotated[EngineConfig, Takes(config=EngineConfig, panel=opt.ENGINE, only=ENGINE)],
    model: opt.ModelOption = None,
    dtype: opt.DType = "auto",
    device: opt.Device = "auto",
    policies: Annotated[
        str, _option(GRID, help="Comma-separated; wrappers and options too: protect(knorm),h2o.")
    ] = DEFAULT_POLICIES,
    budgets: Annotated[
        str, _option(GRID, help="Shares of the full cache's bytes in the model's dtype.")
    ] = "0.5,0.25,0.1",
    kv_cache_dtype: Annotated[
        str, _option(GRID, help="KV formats, comma-separated; all are compared with the first's full cache.")
    ] = "auto",
    seeds: Annotated[str, _option(GRID, help="Each draws other examples.")] = "0",
    num_examples: Annotated[int, _option(GRID, min=1, help="Of each cell, per seed.")] = 16,
    tasks: Annotated[
        str,
        _option(
            TASKS,
            help="recall, multi_query, variable_tracking, rsq, chain, agreement, perplexity, jsonl:PATH.",
        ),
    ] = DEFAULT_TASKS,
    num_tokens: Annotated[int, _option(TASKS, help="Most tokens of a sequence.")] = 2048,
    dialect: Annotated[str, _option(TASKS, help="auto, demo or text.")] = "auto",
    text: Annotated[Path | None, _option(TASKS, help="UTF-8 text of perplexity and agreement.")] = None,
    max_new_tokens: Annotated[int | None, _option(TASKS, help="Of a generated answer.")] = None,
    free_running: Annotated[
        bool, _option(TASKS, "--free-running", help="Also generate gold traces: exact match, decode speed.")
    ] = False,
    batch_size: Annotated[int, _option(opt.ENGINE, min=1, help="Examples at once.")] = 16,
    threads: Annotated[int | None, _option(opt.ENGINE, min=1, help="CPU threads.")] = None,
    out: Annotated[
        Path | None, _option(OUTPUT, help="Journal (the same command goes on after a stop) and report.")
    ] = None,
    json_file: Annotated[Path | None, _option(OUTPUT, "--json", help="All figures.")] = None,
    csv_file: Annotated[Path | None, _option(OUTPUT, "--csv", help="The rows as a table.")] = None,
    html_file: Annotated[Path | None, _option(OUTPUT, "--html", help="The report, one file.")] = None,
) -> None:
    """Compare policies and KV formats at equal bytes: accuracy with intervals, blocks freed, speed."""
    import torch

    from kvreclaim import LLM, demo_model
    from kvreclaim.eval import EvalPlan, TaskOptions
    from kvreclaim.eval.plan import split_specs
    from kvreclaim.eval.tasks import make_tasks
    from kvreclaim.model.loader import hide_progress_bars

    hide_progress_bars()
    files = {"json": json_file, "csv": csv_file, "html": html_file}
    _check_targets(files)
    plan = EvalPlan(
        policies=split_specs(policies),
        budgets=_numbers(budgets, float, "--budgets", "0.5,0.25"),
        kv_cache_dtypes=formats_in(kv_cache_dtype),
        seeds=_numbers(seeds, int, "--seeds", "0,1"),
        num_examples=num_examples,
        batch_size=batch_size,
        free_running=free_running,
        **shared,
    )
    options = TaskOptions(num_tokens=num_tokens, text=text, dialect=dialect, max_new_tokens=max_new_tokens)
    if threads is not None:
        torch.set_num_threads(threads)
    per_sequence = blocks_for(num_tokens, engine.block_size) + 1
    whole_batch = {
        "num_blocks": per_sequence * batch_size,
        "max_num_seqs": batch_size,
        "kv_cache_dtype": plan.kv_cache_dtypes[0],
    }
    llm = LLM(model or demo_model(), dtype=dtype, device=device, **asdict(engine) | whole_batch)
    _report(llm, plan, make_tasks(split_specs(tasks), llm, options), out, files)


def _report(llm: LLM, plan: EvalPlan, tasks: Sequence[Task], out: Path | None, files: Files) -> None:
    from rich.console import Console

    from kvreclaim.eval.compare import run_plan
    from kvreclaim.eval.show import progress_bar, show_report

    errors = Console(stderr=True)
    errors.print(llm.engine.kernels, markup=False)
    try:
        with progress_bar(errors) as on_start:
            report = run_plan(llm, plan, tasks, out=out, command=command_line(), on_start=on_start)
    except KeyboardInterrupt:
        kept = f"the same command goes on from {out}" if out else "nothing was kept; add --out"
        typer.echo(f"interrupted; {kept}", err=True)
        raise typer.Exit(130) from None
    show_report(_console(), report)
    _write(report, out, files)
    if report.errors or not any(row.status == "ok" for row in report.rows):
        raise typer.Exit(1)


def _check_targets(files: Files) -> None:
    """Refuse a file that cannot be written before anything has run, not after hours."""
    for name, path in files.items():
        if path is None:
            continue
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise InvalidArgumentError(
                f"--{name} {str(path)!r} cannot be written; name a file in a directory that can."
            )


def _write(report: EvalReport, out: Path | None, files: Files) -> None:
    """The files that were asked for, and all three in --out."""
    from kvreclaim.eval.html import write_html

    writers: dict[str, Callable[[Path], None]] = {
        "json": report.write_json,
        "csv": report.write_csv,
        "html": lambda path: write_html(report, path),
    }
    for kind, write in writers.items():
        for path in (out and out / f"report.{kind}", files[kind]):
            if path is not None:
                _write_one(write, path)


def _write_one(write: Callable[[Path], None], path: Path) -> None:
    try:
        write(path)
    except OSError as error:
        raise InvalidArgumentError(f"{str(path)!r} cannot be written: {error}.") from error
    typer.echo(f"wrote {path}", err=True)


def _numbers(value: str, kind: type, option: str, example: str) -> Sequence[Any]:
    try:
        return [kind(part) for part in value.split(",") if part.strip()]
    except ValueError as error:
        raise InvalidArgumentError(
            f"{option} is {value!r}, which is no list of numbers; pass, for example, {example}."
        ) from error


def _console() -> Console:
    """As wide as the terminal; in a pipe wide enough for every column."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)
