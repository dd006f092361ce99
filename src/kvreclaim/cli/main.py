"""The `kvreclaim` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvreclaim import __version__, demo_model
from kvreclaim.cli.bench import bench_app
from kvreclaim.cli.generate import generate
from kvreclaim.cli.options import ModelOption, usage_errors

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve language models from a paged KV cache whose compression gives blocks back.",
)
app.add_typer(bench_app, name="bench")
app.command()(generate)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def demo(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    out: Annotated[Path, typer.Option(help="Directory of the chart.")] = Path("demo_out"),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; the model is too small for more.")] = 1,
) -> None:
    """Show on real output what eviction, compaction and query mixtures do to memory and accuracy."""
    import torch

    from kvreclaim.demo.main import present, run_demo
    from kvreclaim.demo.runs import DemoPlan
    from kvreclaim.model.loader import hide_progress_bars

    console = Console()
    torch.set_num_threads(threads)
    with usage_errors():
        hide_progress_bars()
        report = run_demo(demo_model(), DemoPlan(), console, command="kvreclaim demo")
        present(report, console, out, json_file)


@app.command()
def calibrate(
    text: Annotated[Path, typer.Option(help='UTF-8 text; a line "---" begins a new document.')],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file to write.")],
    model: ModelOption = None,
    centers: Annotated[int, typer.Option(help="Query centres per head; 0 keeps moments only.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text that are read.")] = 32_768,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per window of the text.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the clusters' start.")] = 0,
) -> None:
    """Measure a model's pre-RoPE queries for triattention and query_mixture."""
    from kvreclaim.compression import QueryStats
    from kvreclaim.engine.calibration import calibrate as measure
    from kvreclaim.engine.calibration import read_documents
    from kvreclaim.model.loader import hide_progress_bars, load_model

    console = Console()
    with usage_errors():
        hide_progress_bars()
        QueryStats.check_target(output)
        loaded = load_model(model or demo_model(), dtype=dtype, device=device)
        documents = read_documents(loaded, text, max_tokens=max_tokens, context=context)
        stats = measure(loaded, documents, num_centers=centers, seed=seed, show_progress=True)
        stats.save(output)
    for layer, value in enumerate(stats.mean_concentration([x.rope for x in loaded.facts.layers]).tolist()):
        console.print(f"layer {layer:3d}  concentration R {value:.3f}")
    console.print(f"{stats.metadata.num_tokens} tokens, {centers} centres per head: {output}")


if __name__ == "__main__":
    sys.exit(app())
