"""`kvreclaim calibrate`: statistics of a model, and which policy they make its best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvreclaim.calibrate.settings import Measuring, Reading
from kvreclaim.checks import require
from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.options import Device, DType, ModelOption, model_of, writable
from kvreclaim.model_paths import stats_home
from kvreclaim.outputs import writing

if TYPE_CHECKING:
    from kvreclaim.compression.loss_curve import LossCurve
    from kvreclaim.compression.stats import QueryStats
    from kvreclaim.compression.trial import Trial
    from kvreclaim.engine.api.llm import LLM

SHOWN_LOSSES = (0.01, 0.02, 0.05)
_COLUMNS = (
    "cont, {}: nats per token above the full cache on a document's continuation and on {}; right: correct "
    "tokens of the latter, relative to the full cache; loss: both, mean over budgets"
)
_JUDGED = {"asked": "answers to questions", "again": "repeated parts"}


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
            "documentation inside Python's "
            "standard library."
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
    half: Annotated[
        bool, typer.Option("--half", help="Write centers in fp16, which halves the file.")
    ] = False,
    dtype: DType = "auto",
    device: Device = "auto",
) -> None:
    """Measure a model's query statistics for the policies that use them, and find its best policy."""
    from kvreclaim.calibrate.statistics import curve_of, measure
    from kvreclaim.compression.stats import QueryStats
    from kvreclaim.engine.api.llm import FOR_CALIBRATION, LLM
    from kvreclaim.model.loader import hide_progress_bars

    console = Console()
    if show is not None:
        _show(console, QueryStats.load(show))
        return
    if sparse_prefill is not None:
        require(output is None, "--output and --sparse-prefill each write a file of their own; name one.")
        hide_progress_bars()
        llm = LLM(model_of(model), dtype=dtype, device=device, max_num_seqs=1, enable_prefix_caching=False)
        _find_patterns(llm, sparse_prefill, text, reading.max_tokens, budget, console)
        return
    if output is not None:
        QueryStats.check_target(output)
    hide_progress_bars()
    llm = LLM(model_of(model), dtype=dtype, device=device, **FOR_CALIBRATION)
    output = output or _kept(llm)
    if stats_file is not None:
        require(
            bool(reading.curve), "--stats is where a curve is added, and none is asked for; pass --curve."
        )
        stats = QueryStats.load(stats_file)
        stats.check_model(llm.loaded.facts)
        stats = curve_of(llm, text, reading, console.print)(stats)
    else:
        stats = measure(llm, text, reading, {"covariance": covariance, **measuring}, console.print)
    with writing(output):
        stats.save(output, half=half)
    found = stats.mean_concentration([layer.rope for layer in llm.loaded.facts.layers]).tolist()
    console.print(f"concentration R by layer: {' '.join(f'{value:.3f}' for value in found)}")
    _show(console, stats)
    console.print(f"[green]{output}[/green]: {output.stat().st_size / 1e6:.1f} MB")


def _kept(llm: LLM) -> Path:
    """The model's file in the cache directory. Raises: InvalidArgumentError if nobody would read it."""
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


def _show(console: Console, stats: QueryStats) -> None:
    found = stats.metadata
    owner = "KV head" if found.shared_centers else "head"
    extra = ", with covariance" if found.covariance else ""
    extra += ", with a surrogate" if found.features else ", without a surrogate"
    extra += ", with weights of hidden states" if found.kvzap_inputs else ""
    extra += ", with shares of heads" if found.fractions else ", without shares of heads"
    console.print(
        f"{found.model_name}: {found.num_tokens} tokens, {found.num_centers} centres per {owner}{extra}"
    )
    if found.trial is None:
        console.print("no trial: policy auto needs one (longer text, or --trial above 0)")
    else:
        _show_trial(console, found.trial)
    if found.curve is not None:
        _show_curve(console, found.curve)


def _show_trial(console: Console, trial: Trial) -> None:
    full, judged = trial.full, trial.judged
    title = f"trial: {trial.documents} held-out documents, {trial.tokens} tokens in the cache"
    if trial.questions:
        title += f", {trial.questions} questions"
    caption = _COLUMNS.format(judged, _JUDGED[judged])
    table = Table("policy", title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption_justify, table.columns[0].no_wrap = "left", True
    for name in ("loss", "kept", "cont", judged, "right"):
        table.add_column(name, justify="right", no_wrap=True)
    full_nats, full_right = getattr(full, judged), getattr(full, f"{judged}_right")
    table.add_row("full", "", "100%", f"({full.once:.3f})", f"({full_nats:.3f})", f"({full_right:.3f})")
    for policy in trial.ranked:
        named = (policy, f"{trial.loss(policy):.3f}")
        for row in (row for row in trial.outcomes if row.policy == policy):
            right = getattr(row, f"{judged}_right") / full_right if full_right else math.nan
            table.add_row(
                *named,
                f"{row.fraction:.0%}",
                f"{row.once - full.once:+.3f}",
                f"{getattr(row, judged) - full_nats:+.3f}",
                f"{right:.1%}",
            )
            named = ("", "")
    console.print(table)
    for policy, reason in trial.refused.items():
        console.print(f"not tried: {policy}: {reason}", markup=False)
    if not trial.questions and not trial.reads_back:
        console.print(
            "repetition does not count: the full cache repeats a document no better than it continues it"
        )
    console.print(f"policy auto: [bold]{trial.best}[/bold]")


def _show_curve(console: Console, curve: LossCurve) -> None:
    table = Table(
        "content",
        title=f"loss curve of {curve.policy}: {len(curve.cells[0].losses)} held-out documents each",
        caption="loss: share of answers that the full cache gives right and the compressed one wrong, median "
        "and what 95 % of documents like these do not exceed",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.caption_justify = "left"
    for name in ("tokens", "right", "budget", "kept", "median", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in curve.cells:
        named = (cell.content, f"{cell.num_tokens}", f"{cell.right:.1%}")
        for budget in cell.budgets:
            median, bound = cell.summary(budget)
            table.add_row(
                *named, f"{budget}", f"{budget / cell.num_tokens:.1%}", f"{median:.2%}", f"{bound:.2%}"
            )
            named = ("", "", "")
    console.print(table)
    for cell in curve.cells:
        budgets = ((loss, cell.promised(loss)) for loss in SHOWN_LOSSES)
        kept = ", ".join(f"{loss:g}: {'all' if b == cell.num_tokens else b}" for loss, b in budgets)
        console.print(f"--kv-max-loss on {cell.content} of {cell.num_tokens} tokens keeps at {kept}")
