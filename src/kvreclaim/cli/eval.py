"""`kvreclaim eval`: policies x budgets x KV formats x tasks, in one table."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreclaim.cli import options as opt
from kvreclaim.cli.bench_options import formats_in
from kvreclaim.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from kvreclaim import LLM
    from kvreclaim.eval import EvalPlan, EvalReport, TaskOptions

DEFAULT_POLICIES = "full,streaming_llm,knorm,triattention,query_mixture"
DEFAULT_TASKS = "recall,multi_query,variable_tracking,rsq"
GRID, TASKS, OUTPUT = "grid", "tasks", "output"
ENGINE = ("dtype", "device", "kernels", "block_size", "max_num_batched_tokens", "max_model_len")


def _option(panel: str, *names: str, **facts: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **facts)


def evaluate(
    model: opt.ModelOption = None,
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
    interval: Annotated[int, _option(opt.COMPRESSION, help="Tokens between two compressions.")] = 128,
    sinks: Annotated[int, _option(opt.COMPRESSION, help="First tokens, never evicted.")] = 4,
    recent: Annotated[int, _option(opt.COMPRESSION, help="Last tokens, never evicted.")] = 64,
    mode: opt.CompressionText = None,
    stats: Annotated[
        str | None, _option(opt.COMPRESSION, help="Those beside the weights by default.")
    ] = None,
    protect_prompt: Annotated[bool, _option(opt.COMPRESSION, "--protect-prompt")] = False,
    dtype: opt.DType = "auto",
    device: opt.Device = "auto",
    kernels: opt.Kernels = "auto",
    block_size: opt.EngineInt = 16,
    max_num_batched_tokens: opt.EngineInt = 2048,
    max_model_len: opt.EngineLimit = None,
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
    given = dict(locals())
    with opt.usage_errors():
        _run(given)


def _run(given: dict[str, Any]) -> None:
    import torch
    from rich.console import Console

    from kvreclaim.eval import TaskOptions
    from kvreclaim.eval.compare import run_plan
    from kvreclaim.eval.show import progress_bar, show_report
    from kvreclaim.eval.tasks import make_tasks
    from kvreclaim.model.loader import hide_progress_bars

    hide_progress_bars()
    _check_targets(given)
    plan = _plan(given)
    names = ("num_tokens", "text", "dialect", "max_new_tokens")
    options = TaskOptions(**{name: given[name] for name in names})
    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    llm = _llm(given, plan, options)
    tasks = make_tasks(_split(given["tasks"]), llm, options)
    errors = Console(stderr=True)
    errors.print(llm.engine.kernels, markup=False)
    try:
        with progress_bar(errors) as on_start:
            report = run_plan(llm, plan, tasks, out=given["out"], command=_command(), on_start=on_start)
    except KeyboardInterrupt:
        kept = (
            f"the same command goes on from {given['out']}" if given["out"] else "nothing was kept; add --out"
        )
        typer.echo(f"interrupted; {kept}", err=True)
        raise typer.Exit(130) from None
    show_report(_console(), report)
    _write(report, given)
    if report.errors or not any(row.status == "ok" for row in report.rows):
        raise typer.Exit(1)


def _plan(given: dict[str, Any]) -> EvalPlan:
    from kvreclaim.eval import EvalPlan

    shared = (
        "num_examples",
        "interval",
        "sinks",
        "recent",
        "mode",
        "stats",
        "protect_prompt",
        "free_running",
    )
    return EvalPlan(
        policies=_split(given["policies"]),
        budgets=_numbers(given["budgets"], float, "--budgets", "0.5,0.25"),
        kv_cache_dtypes=formats_in(given["kv_cache_dtype"]),
        seeds=_numbers(given["seeds"], int, "--seeds", "0,1"),
        batch_size=given["batch_size"],
        **{name: given[name] for name in shared},
    )


def _llm(given: dict[str, Any], plan: EvalPlan, options: TaskOptions) -> LLM:
    """A pool that holds the full cache of a whole batch."""
    from kvreclaim import LLM, demo_model
    from kvreclaim.checks import check_int

    check_int("block_size", given["block_size"], 1)
    per_sequence = -(-options.num_tokens // given["block_size"]) + 1
    return LLM(
        given["model"] or demo_model(),
        num_blocks=per_sequence * plan.batch_size,
        max_num_seqs=plan.batch_size,
        kv_cache_dtype=plan.kv_cache_dtypes[0],
        **{name: given[name] for name in ENGINE},
    )


def _check_targets(given: dict[str, Any]) -> None:
    """Refuse a file that cannot be written before anything has run, not after hours."""
    for name in ("json", "csv", "html"):
        path: Path | None = given[f"{name}_file"]
        if path is None:
            continue
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise InvalidArgumentError(
                f"--{name} {str(path)!r} cannot be written; name a file in a directory that can."
            )


def _write(report: EvalReport, given: dict[str, Any]) -> None:
    """The files that were asked for, and all three in --out."""
    from kvreclaim.eval.html import write_html

    out: Path | None = given["out"]
    inside = [None] * 3 if out is None else [out / f"report.{suffix}" for suffix in ("json", "csv", "html")]
    asked = (given["json_file"], given["csv_file"], given["html_file"])
    writers = (report.write_json, report.write_csv, lambda path: write_html(report, path))
    for write, paths in zip(writers, zip(inside, asked, strict=True), strict=True):
        for path in paths:
            if path is not None:
                _write_one(write, path)


def _write_one(write: Any, path: Path) -> None:
    try:
        write(path)
    except OSError as error:
        raise InvalidArgumentError(f"{str(path)!r} cannot be written: {error}.") from error
    typer.echo(f"wrote {path}", err=True)


def _split(value: str) -> list[str]:
    from kvreclaim.eval.plan import split_specs

    return split_specs(value)


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


def _command() -> str:
    return shlex.join(["kvreclaim", *sys.argv[1:]])
