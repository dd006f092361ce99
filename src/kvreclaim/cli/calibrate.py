"""`kvreclaim calibrate`: statistics of a model, for the policies that read them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvreclaim.cli.options import Device, DType, ModelOption, model_of
from kvreclaim.cli.takes import Takes, takes
from kvreclaim.options import check_options, option


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read of the text."""

    max_tokens: int = option(32_768, "Tokens of the text that are read.", low=1)
    context: int | None = option(None, "Tokens per window of the text.", low=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """What is kept of the queries, as compression.Clustering checks it."""

    num_centers: int = option(16, "Query centres per head; 0 keeps moments only.", flags=("--centers",))
    shared_centers: bool = option(False, "Centres per KV head instead, for all its query heads.")
    min_weight: float = option(0.0, "Drop centres of a smaller share of the queries.")
    min_distance: float = option(0.0, "Pool centres closer than this share of the spread.")
    seed: int = option(0, "Of the clusters' start.")
    surrogate: int | None = option(
        None, "Pieces of 1,024 tokens that the surrogate is fitted to; 16 where not said, 0 leaves it out."
    )


@takes
def calibrate(
    text: Annotated[Path, typer.Option(help='UTF-8 text; a line "---" begins a new document.')],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors file to write.")],
    reading: Annotated[Reading, Takes(config=Reading)],
    measuring: Annotated[dict[str, Any], Takes(config=Measuring, build=dict)],
    model: ModelOption = None,
    covariance: Annotated[
        bool | None,
        typer.Option(
            "--covariance/--no-covariance",
            help="Keep the covariance of the queries (expected_attention); where not said, up to 128 MiB.",
        ),
    ] = None,
    dtype: DType = "auto",
    device: Device = "auto",
) -> None:
    """Measure a model's queries before rotation and fit its surrogate, for the policies that read them."""
    from kvreclaim.compression import QueryStats
    from kvreclaim.engine.face.calibration import calibrate as measure
    from kvreclaim.engine.face.calibration import read_documents
    from kvreclaim.model.loader import hide_progress_bars, load_model

    hide_progress_bars()
    QueryStats.check_target(output)
    loaded = load_model(model_of(model), dtype=dtype, device=device)
    documents = read_documents(loaded, text, **asdict(reading))
    stats = measure(loaded, documents, show_progress=True, covariance=covariance, **measuring)
    stats.save(output)
    console = Console()
    for layer, value in enumerate(stats.mean_concentration([x.rope for x in loaded.facts.layers]).tolist()):
        console.print(f"layer {layer:3d}  concentration R {value:.3f}")
    found = stats.metadata
    owner = "KV head" if found.shared_centers else "head"
    extra = ", with covariance" if found.covariance else ""
    extra += ", with a surrogate" if found.features else ", without a surrogate"
    console.print(f"{found.num_tokens} tokens, {found.num_centers} centres per {owner}{extra}: {output}")
