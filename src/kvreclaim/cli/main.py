"""The `kvreclaim` command."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvreclaim import demo_model, real_model
from kvreclaim.cli.bench import bench_app
from kvreclaim.cli.build_facts import build_facts
from kvreclaim.cli.calibrate import calibrate
from kvreclaim.cli.calibrate_speed import calibrate_speed
from kvreclaim.cli.config_options import with_config
from kvreclaim.cli.eval import evaluate
from kvreclaim.cli.fetch import fetch
from kvreclaim.cli.generate import generate
from kvreclaim.cli.ls import ls
from kvreclaim.cli.options import Figures, KVCacheDType, folder
from kvreclaim.cli.plan import plan
from kvreclaim.cli.rm import rm
from kvreclaim.cli.run import run
from kvreclaim.cli.serve import serve
from kvreclaim.cli.simulate import simulate
from kvreclaim.config import EngineConfig

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve language models from a paged KV cache whose compression gives blocks back.",
)
app.add_typer(bench_app, name="bench")
app.command()(run)
app.command()(generate)
app.command()(serve)
app.command("eval")(evaluate)
app.command()(calibrate)
app.command()(calibrate_speed)
app.command()(fetch)
app.command()(ls)
app.command()(rm)
app.command()(plan)
app.command()(simulate)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join(build_facts().lines()))
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print version and build.",
        ),
    ] = False,
) -> None:
    """Options for every command."""


@app.command()
@with_config
def demo(
    engine: Annotated[EngineConfig, KVCacheDType],
    json_file: Figures = None,
    out: Annotated[Path, typer.Option(help="Directory for the chart.", callback=folder)] = Path("demo_out"),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for the demo model.")] = 1,
) -> None:
    """Show what eviction, compaction and learned scores do to memory and accuracy, on the demo model and on
    the model that `kvreclaim fetch` downloaded."""
    import torch

    from kvreclaim.demo.main import add_real, present, run_demo
    from kvreclaim.demo.real import RealPlan
    from kvreclaim.demo.runs import DemoPlan
    from kvreclaim.model.loader import hide_progress_bars

    console = Console()
    all_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    hide_progress_bars()
    chosen = engine.kv_cache_dtype
    option = "" if chosen == "auto" else f" --kv-cache-dtype {chosen}"
    report = run_demo(
        demo_model(), DemoPlan(kv_cache_dtype=chosen), console, command=f"kvreclaim demo{option}"
    )
    real = real_model()
    if real is None:
        console.print(
            "No real language model is here; `make real-model` brings the one that the demo ends on."
        )
    else:
        torch.set_num_threads(all_threads)
        add_real(report, real, RealPlan(), console)
    present(report, console, out, json_file)


def main() -> None:
    """The command's process: it ends as an interpreter does, but frees nothing object by object, which with
    torch and transformers takes a second."""
    try:
        app()
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        _leave(ended.code or 0)


def _leave(code: int) -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (
        AttributeError,
        OSError,
        ValueError,
    ):  # closed, or nobody reads: as the interpreter says it
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    main()
