"""`kvreclaim eval`: policies x budgets x KV formats x tasks, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreclaim.checks import require
from kvreclaim.chunks import WHOLE
from kvreclaim.cli import options as opt
from kvreclaim.cli.bench_options import command_line
from kvreclaim.cli.config_options import ConfigOptions, names_in, with_config
from kvreclaim.cli.model_names import model_of
from kvreclaim.cli.uncollected import uncollected
from kvreclaim.compression_settings import CompressionSettings
from kvreclaim.config import EngineConfig
from kvreclaim.eval.plan import RULER, SERVER, UNSHARED, EvalPlan, TaskOptions
from kvreclaim.eval.task_names import TASK_KINDS, check_tasks
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.options import COMPRESSION, option
from kvreclaim.outputs import check_writable

if TYPE_CHECKING:
    from kvreclaim import LLM
    from kvreclaim.eval import EvalReport

KINDS = ("json", "csv")
DEFAULT_TASKS = "recall,multi_query,variable_tracking"
TASKS = "Tasks"
BESIDE_RULER = 256
"""Tokens of RULER's sequences beyond num_tokens: the chat template, and the answer of fwe."""
FOR_GRIDS = ("seeds", "num_examples", "batch_size")
FOR_SERVERS = ("url", "api_key", "model", "tasks", *FOR_GRIDS)
"""Options that apply to a server."""
ENGINE = (
    "kernels",
    "threads",
    "block_size",
    "max_num_batched_tokens",
    "max_model_len",
    "spread_compression",
    "enforce_eager",
)


@dataclass(frozen=True)
class EvalOutputs:
    """Files that are written, besides the tables on the terminal."""

    out: Path | None = option(
        None, "Directory for the report and a journal, with which the same command continues after a stop."
    )
    json: Path | None = option(None, "Write all results to this JSON file.")
    csv: Path | None = option(None, "Write the rows to this CSV file.")

    def __post_init__(self) -> None:
        """Refuse a file that cannot be written before anything has run, not after hours."""
        for name in KINDS:
            if (path := getattr(self, name)) is not None:
                check_writable(path, f"--{name}")
        if self.out is not None:
            require(
                not self.out.exists() or self.out.is_dir(),
                f"--out {str(self.out)!r} cannot be written; it is a file; name a directory.",
            )
            check_writable(self.out / "report.json", "--out")

    def of(self, kind: str) -> Iterator[Path]:
        """Yield the named file, and one in --out."""
        named = getattr(self, kind)
        yield from (path for path in (self.out and self.out / f"report.{kind}", named) if path is not None)


@with_config
def evaluate(
    context: typer.Context,
    grid: Annotated[dict[str, Any], ConfigOptions(config=EvalPlan, panel="Grid", build=dict)],
    shared: Annotated[
        dict[str, Any],
        ConfigOptions(
            config=CompressionSettings,
            panel=COMPRESSION,
            without=tuple(name for name in UNSHARED if name not in ("max_loss", "content", "stats")),
            defaults={"recent": 64},
            own_names=True,
            build=dict,
        ),
    ],
    engine: Annotated[EngineConfig, ConfigOptions(config=EngineConfig, only=ENGINE)],
    sizes: Annotated[TaskOptions, ConfigOptions(config=TaskOptions, panel=TASKS)],
    files: Annotated[EvalOutputs, ConfigOptions(config=EvalOutputs, panel="Output")],
    tasks: Annotated[
        str,
        typer.Option(
            rich_help_panel=TASKS,
            help=f"Tasks (`kvreclaim tasks` says what they measure): {', '.join(TASK_KINDS)}.",
        ),
    ] = DEFAULT_TASKS,
    calibrate: opt.Calibrate = False,
    url: Annotated[
        str | None, typer.Option(help="Judge this server with OpenAI's API, instead of an engine here.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of the server.")] = None,
    model: opt.ModelOption = None,
    dtype: opt.DType = "auto",
    device: opt.Device = "auto",
) -> None:
    """Compare policies and KV formats at equal bytes: accuracy with intervals, blocks freed, speed."""
    names = check_tasks(names_in(tasks), sizes)
    if url is not None:
        _refuse_engine_options(context)
        _evaluate_server(url, api_key, model, names, grid, sizes, files)
        return
    require(api_key is None, "--api-key is a server's; add --url, or leave it out.")
    path = model_of(model)
    with uncollected():
        plan = EvalPlan(**grid, **shared)  # its policies import torch
    options = {"calibrate": opt.with_calibration(None, calibrate and plan.stats is None)[1]}
    llm = _engine(path, plan, engine, names, sizes, dtype=dtype, device=device, **options)
    from kvreclaim.eval.compare import run_plan
    from kvreclaim.eval.tasks import make_tasks

    typer.echo(llm.engine.kernels, err=True)
    _report(partial(run_plan, llm, plan, make_tasks(names, llm, sizes)), files)


def _engine(
    path: str | Path,
    plan: EvalPlan,
    engine: EngineConfig,
    names: Sequence[str],
    sizes: TaskOptions,
    **options: Any,
) -> LLM:
    """Build an engine with a pool for a whole batch and its prompts in the prefix cache."""
    from kvreclaim import LLM
    from kvreclaim.model.loader import hide_progress_bars

    hide_progress_bars()
    has_ruler = any(name.partition(":")[0] == RULER for name in names)
    longest = sizes.num_tokens + (BESIDE_RULER if has_ruler else 0)
    copies = 2 if plan.chunk_reuse == (WHOLE,) else 3  # running, cached, and chunks
    whole_batch = {
        "num_blocks": copies * (blocks_for(longest, engine.block_size) + 1) * plan.batch_size,
        "max_num_seqs": plan.batch_size,
        "kv_cache_dtype": plan.kv_cache_dtypes[0],
        "stats": plan.stats,
    }
    if has_ruler:  # a document is one chunk, so that it is compressed once
        whole_batch["max_num_batched_tokens"] = max(engine.max_num_batched_tokens, longest)
    return LLM(path, **asdict(engine) | whole_batch | options)


def _evaluate_server(
    url: str,
    api_key: str | None,
    model: str | None,
    names: Sequence[str],
    grid: Mapping[str, Any],
    sizes: TaskOptions,
    files: EvalOutputs,
) -> None:
    """Judge a server. model: one of its names, or where its model's tokenizer is."""
    with uncollected():
        from kvreclaim.eval.compare import run_server
        from kvreclaim.eval.remote import RemoteServer, remote_tasks
        from kvreclaim.model.loader import load_tokenizer

    plan = EvalPlan(policies=[SERVER], budgets=[1.0], **{name: grid[name] for name in FOR_GRIDS})
    server = RemoteServer(url, api_key, model)
    source = model_of(server.root if model in (None, server.model) else model)
    tasks = remote_tasks(names, server, load_tokenizer(source), sizes)
    _report(partial(run_server, server, plan, tasks), files)


def _refuse_engine_options(context: typer.Context) -> None:
    """Raises: InvalidArgumentError for options that --url leaves without effect."""
    given = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        applies = name.removeprefix("grid_") in FOR_SERVERS or name.startswith(("sizes_", "files_"))
        if source is not None and source.name != "DEFAULT" and not applies:
            given.append(parameter.opts[0])
    require(
        not given,
        f"{', '.join(given)} set an engine of this process, and --url judges a server as it was started; "
        "leave them out.",
    )


def _report(run: Callable[..., EvalReport], files: EvalOutputs) -> None:
    from kvreclaim.bench.common import wide_console
    from kvreclaim.eval.show import progress_bar, show_estimate, show_report

    errors = wide_console(stderr=True)
    try:
        with progress_bar(errors) as on_start:
            report = run(
                out=files.out,
                command=command_line(),
                on_start=on_start,
                on_estimate=partial(show_estimate, errors),
            )
    except KeyboardInterrupt:
        kept = f"the same command goes on from {files.out}" if files.out else "nothing was kept; add --out"
        typer.echo(f"interrupted; {kept}", err=True)
        raise typer.Exit(130) from None
    show_report(wide_console(), report)
    _write(report, files)
    if report.errors or not any(row.status == "ok" for row in report.rows):
        raise typer.Exit(1)


def _write(report: EvalReport, files: EvalOutputs) -> None:
    for kind, write in zip(KINDS, (report.write_json, report.write_csv), strict=True):
        for path in files.of(kind):
            write(path)
            typer.echo(f"wrote {path}", err=True)
