"""`kvreclaim calibrate`: statistics of a model, and which policy they make its best."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvreclaim.checks import require
from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.options import Device, DType, ModelOption, model_of, writable
from kvreclaim.options import check_options, option

if TYPE_CHECKING:
    from kvreclaim.compression.stats import QueryStats
    from kvreclaim.compression.trial import Trial
    from kvreclaim.engine.api.llm import LLM

_COLUMNS = (
    "cont, rep: nats per token above the full cache on a document's continuation and on repeated parts; "
    "right: correctly repeated tokens, relative to the full cache; loss: both, mean over budgets"
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How much of the text is read."""

    max_tokens: int = option(6144, "Maximum number of tokens to read from the text.", low=1)
    trial: int = option(1, "Documents to hold out for the trial of the candidates; 0: no trial.", low=0)
    candidates: tuple[str, ...] = option((), "More policies to try, besides the standard ones.")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """Statistics kept of the queries; compression.Clustering checks them."""

    num_centers: int = option(16, "Query centers per head; 0 keeps only moments.", flags=("--centers",))
    shared_centers: bool = option(False, "Share centers among the query heads of a KV head.")
    min_weight: float = option(0.0, "Drop centers with a smaller share of the queries.")
    min_distance: float = option(0.0, "Merge centers closer than this share of the spread.")
    seed: int = option(0, "Seed of the clustering.")
    surrogate: bool = option(True, "Repeat the text and learn which tokens and heads the repetition needs.")
    kvzap: str | None = option(
        None, "Score weights on hidden states: fit them (linear or mlp), or load them from a directory."
    )
    max_points: int = option(4096, "Queries per head that are clustered, evenly spaced over the text.", low=1)


@with_config
def calibrate(
    reading: Annotated[Reading, ConfigOptions(config=Reading)],
    measuring: Annotated[dict[str, Any], ConfigOptions(config=Measuring, build=dict)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the statistics to this .safetensors file.")
    ] = None,
    show: Annotated[
        Path | None, typer.Option(help="Print the trial in this statistics file, and measure nothing.")
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
    from kvreclaim.compression.stats import QueryStats
    from kvreclaim.engine.api.llm import LLM
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
    require(output is not None, "no file is named to write; add --output FILE.safetensors.")
    assert output is not None
    QueryStats.check_target(output)
    hide_progress_bars()
    llm = LLM(
        model_of(model),
        dtype=dtype,
        device=device,
        num_blocks=1,
        max_model_len=1,
        disable_hybrid_kv_cache_manager=True,
    )
    stats = _measure(llm, text, reading, {"covariance": covariance, **measuring}, console)
    stats.save(output, half=half)
    found = stats.mean_concentration([layer.rope for layer in llm.loaded.facts.layers]).tolist()
    console.print(f"concentration R by layer: {' '.join(f'{value:.3f}' for value in found)}")
    _show(console, stats)
    console.print(f"[green]{output}[/green]: {output.stat().st_size / 1e6:.1f} MB")


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


def _measure(
    llm: LLM, text: Path | None, reading: Reading, measuring: dict[str, Any], console: Console
) -> QueryStats:
    """Statistics of one part of the text, and a trial on another."""
    from kvreclaim.calibrate import trial
    from kvreclaim.calibrate.calibration import calibrate as measure
    from kvreclaim.calibrate.calibration import held_out, pieces, read_documents
    from kvreclaim.compression.trial import CANDIDATES, FRACTIONS

    found = read_documents(
        llm.loaded, text, max_tokens=reading.max_tokens, context=trial.window(llm.loaded.facts)
    )
    rest, tried = held_out(found, reading.trial)
    documents = pieces(rest)
    asked = ("shares(kvzap)",) if measuring.get("kvzap") else ()
    candidates = tuple(dict.fromkeys((*CANDIDATES, *asked, *reading.candidates)))
    _announce(llm, documents, tried, 1 + len(candidates) * len(FRACTIONS), console)
    stats = measure(llm.loaded, documents, show_progress=True, **measuring)
    if not tried:
        return stats
    found_best = trial.try_candidates(llm, stats, tried, candidates=candidates, show_progress=True)
    return stats.with_trial(found_best)


def _announce(
    llm: LLM, documents: Sequence[list[int]], tried: Sequence[list[int]], num_settings: int, console: Console
) -> None:
    """Print an estimate of the duration, from one forward pass."""
    from kvreclaim.calibrate.trial import num_tokens
    from kvreclaim.model.capture import capture_queries

    started = time.perf_counter()
    capture_queries(llm.loaded, [documents[0]], lambda *_: None)
    per_token = (time.perf_counter() - started) / len(documents[0])
    fitted = sum(map(len, documents))
    tokens = 3 * fitted + sum(num_tokens(len(document), num_settings) for document in tried)
    console.print(
        f"{fitted} tokens to fit to, {len(tried)} documents to try {num_settings} settings on: about "
        f"{max(1, math.ceil(tokens * per_token / 60))} min"
    )


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


def _show_trial(console: Console, trial: Trial) -> None:
    full = trial.full
    title = f"trial: {trial.documents} held-out documents, {trial.tokens} tokens in the cache"
    table = Table("policy", title=title, caption=_COLUMNS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption_justify, table.columns[0].no_wrap = "left", True
    for name in ("loss", "kept", "cont", "rep", "right"):
        table.add_column(name, justify="right", no_wrap=True)
    full_right = f"({full.again_right:.3f})"
    table.add_row("full", "", "100%", f"({full.once:.3f})", f"({full.again:.3f})", full_right)
    for policy in trial.ranked:
        named = (policy, f"{trial.loss(policy):.3f}")
        for row in (row for row in trial.outcomes if row.policy == policy):
            right = row.again_right / full.again_right if full.again_right else math.nan
            table.add_row(
                *named,
                f"{row.fraction:.0%}",
                f"{row.once - full.once:+.3f}",
                f"{row.again - full.again:+.3f}",
                f"{right:.1%}",
            )
            named = ("", "")
    console.print(table)
    for policy, reason in trial.refused.items():
        console.print(f"not tried: {policy}: {reason}", markup=False)
    if not trial.reads_back:
        console.print(
            "repetition does not count: the full cache repeats a document no better than it continues it"
        )
    console.print(f"policy auto: [bold]{trial.best}[/bold]")
