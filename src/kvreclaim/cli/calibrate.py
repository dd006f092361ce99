"""`kvreclaim calibrate`: statistics of a model, and which policy they make its best."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvreclaim.calibrate.settings import Measuring, Reading
from kvreclaim.checks import require
from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.model_names import model_of
from kvreclaim.cli.options import Device, DType, ModelOption, writable
from kvreclaim.cli.show_statistics import show_statistics
from kvreclaim.model_paths import stats_home
from kvreclaim.outputs import writing

if TYPE_CHECKING:
    from kvreclaim.engine.api.llm import LLM


@with_config
def calibrate(
    reading: Annotated[Reading, ConfigOptions(config=Reading)],
    measuring: Annotated[dict[str, Any], ConfigOptions(config=Measuring, build=dict)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the statistics to this .safetensors file. Default: the model's file in the cache "
            "directory, which policy auto finds.",
        ),
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option(help="Print the trial and the loss curve in this statistics file, and measure nothing."),
    ] = None,
    stats_file: Annotated[
        Path | None,
        typer.Option("--stats", help="Add --curve to the statistics in this file, and measure nothing else."),
    ] = None,
    sparse_prefill: Annotated[
        Path | None,
        typer.Option(help="Write a sparse-prefill pattern per head to this file instead.", callback=writable),
    ] = None,
    budget: Annotated[
        int, typer.Option(help="Tokens that each sparse-prefill pattern reads.", min=128)
    ] = 2048,
    text: Annotated[
        Path | None,
        typer.Option(
            help='UTF-8 text file; a line "---" begins a new document. Default: '
            "documentation inside Python's standard library."
        ),
    ] = None,
    model: ModelOption = None,
    covariance: Annotated[
        bool | None,
        typer.Option(
            "--covariance/--no-covariance",
            help="Keep the covariance of the queries, for expected_attention. Default: if it takes at most "
            "128 MiB.",
        ),
    ] = None,
    dtype: DType = "auto",
    device: Device = "auto",
) -> None:
    """Measure a model's query statistics for the policies that use them, and find its best policy."""
    console = Console()
    if show is not None:
        from kvreclaim.compression.stats import QueryStats

        show_statistics(console, QueryStats.load(show))
        return
    path = model_of(model)
    from kvreclaim.calibrate.statistics import curve_of, measure
    from kvreclaim.compression.stats import QueryStats
    from kvreclaim.engine.api.llm import FOR_CALIBRATION, LLM
    from kvreclaim.model.loader import hide_progress_bars

    if sparse_prefill is not None:
        require(output is None, "--output and --sparse-prefill each write a file of their own; name one.")
        hide_progress_bars()
        llm = LLM(path, dtype=dtype, device=device, max_num_seqs=1, enable_prefix_caching=False)
        _find_patterns(llm, sparse_prefill, text, reading.max_tokens, budget, console)
        return
    if output is not None:
        QueryStats.check_target(output)
    hide_progress_bars()
    llm = LLM(path, dtype=dtype, device=device, **FOR_CALIBRATION)
    output = output or _kept(llm)
    if stats_file is not None:
        require(bool(reading.curve), "--stats takes a curve, and none is measured; pass --curve.")
        stats = QueryStats.load(stats_file)
        stats.check_model(llm.loaded.facts)
        stats = curve_of(llm, text, reading, stats.metadata.read, console.print)(stats)
    else:
        stats = measure(llm, text, reading, {"covariance": covariance, **measuring}, console.print)
    with writing(output):
        stats.save(output)
    found = stats.mean_concentration([layer.rope for layer in llm.loaded.facts.layers]).tolist()
    console.print(f"concentration R by layer: {' '.join(f'{value:.3f}' for value in found)}")
    show_statistics(console, stats)
    console.print(f"[green]{output}[/green]: {output.stat().st_size / 1e6:.1f} MB")


def _kept(llm: LLM) -> Path:
    """The model's file in the cache directory. Raises: InvalidArgumentError if it would not be read."""
    from kvreclaim.calibrate.statistics import check_keeps

    file = llm.stats_file
    require(
        file.parent == stats_home(),
        f"statistics in {str(file)!r} are read before those in the cache directory; add --output "
        "FILE.safetensors, or remove them.",
    )
    check_keeps(file)
    return file


def _find_patterns(
    llm: LLM, target: Path, text: Path | None, max_tokens: int, budget: int, console: Console
) -> None:
    """A pattern of sparse prefill for each head."""
    from kvreclaim.calibrate.calibration import read_documents
    from kvreclaim.calibrate.prefill_patterns import find_patterns

    found = read_documents(llm.loaded, text, max_tokens=max_tokens, context=llm.engine.max_model_len - 1)
    patterns = find_patterns(llm, found, budget=budget)
    patterns.save(target)
    heads = [head for layer in patterns.heads for head in layer]
    counts = (f"{heads.count(n)} {method.name}" for n, method in enumerate(patterns.methods))
    console.print(f"{len(heads)} KV heads: {', '.join(counts)}")
    console.print(f"kvreclaim serve --sparse-prefill \"minference(heads='{target}')\"", markup=False)
