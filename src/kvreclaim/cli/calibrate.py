"""`kvreclaim calibrate`: measure a model's queries before rotation, for the policies that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvreclaim.cli.options import Device, DType, ModelOption
from kvreclaim.cli.takes import usage_errors

Text = Annotated[Path, typer.Option(help='UTF-8 text; a line "---" begins a new document.')]
Output = Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file to write.")]
Centers = Annotated[int, typer.Option(help="Query centres per head; 0 keeps moments only.")]
Shared = Annotated[
    bool, typer.Option("--shared-centers", help="Centres per KV head instead, for all its query heads.")
]
MinWeight = Annotated[float, typer.Option(help="Drop centres of a smaller share of the queries.")]
MinDistance = Annotated[float, typer.Option(help="Pool centres closer than this share of the spread.")]
Covariance = Annotated[
    bool | None,
    typer.Option(
        "--covariance/--no-covariance",
        help="Keep the covariance of the queries (expected_attention); where not said, up to 128 MiB of it.",
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of the text that are read.")]
Context = Annotated[int | None, typer.Option(min=1, help="Tokens per window of the text.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the clusters' start.")]


def calibrate(
    text: Text,
    output: Output,
    model: ModelOption = None,
    centers: Centers = 16,
    shared_centers: Shared = False,
    min_weight: MinWeight = 0.0,
    min_distance: MinDistance = 0.0,
    covariance: Covariance = None,
    max_tokens: MaxTokens = 32_768,
    context: Context = None,
    dtype: DType = "auto",
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure a model's pre-RoPE queries for triattention, query_mixture and expected_attention."""
    options = {
        "num_centers": centers,
        "shared_centers": shared_centers,
        "min_weight": min_weight,
        "min_distance": min_distance,
        "covariance": covariance,
        "seed": seed,
    }
    limits = {"max_tokens": max_tokens, "context": context}
    with usage_errors():
        _run(text, output, model, {"dtype": dtype, "device": device}, limits, options)


def _run(
    text: Path,
    output: Path,
    model: str | None,
    place: dict[str, Any],
    limits: dict[str, Any],
    options: dict[str, Any],
) -> None:
    from kvreclaim import demo_model
    from kvreclaim.compression import QueryStats
    from kvreclaim.engine.face.calibration import calibrate as measure
    from kvreclaim.engine.face.calibration import read_documents
    from kvreclaim.model.loader import hide_progress_bars, load_model

    hide_progress_bars()
    QueryStats.check_target(output)
    loaded = load_model(model or demo_model(), **place)
    documents = read_documents(loaded, text, **limits)
    stats = measure(loaded, documents, show_progress=True, **options)
    stats.save(output)
    console = Console()
    for layer, value in enumerate(stats.mean_concentration([x.rope for x in loaded.facts.layers]).tolist()):
        console.print(f"layer {layer:3d}  concentration R {value:.3f}")
    found = stats.metadata
    owner = "KV head" if found.shared_centers else "head"
    extra = ", with covariance" if found.covariance else ""
    console.print(f"{found.num_tokens} tokens, {found.num_centers} centres per {owner}{extra}: {output}")
