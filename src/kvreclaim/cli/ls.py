"""`kvreclaim ls`: the models that are here."""

from __future__ import annotations

from datetime import datetime

import typer

from kvreclaim.cli.config_options import with_config
from kvreclaim.cli.local_models import local_models
from kvreclaim.errors import printable
from kvreclaim.model_paths import models_home

COLUMNS = ("name", "size", "modified", "weights", "context", "statistics")


@with_config
def ls() -> None:
    """List the models in the cache directory: those of `kvreclaim fetch`, GGUF files, copies of packed
    weights, and what killed commands left over."""
    from rich.console import Console
    from rich.table import Table

    models = local_models()
    if not models:
        typer.echo(f"no model is in {models_home()}; `kvreclaim fetch` brings one", err=True)
        return
    table = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for model in models:
        when = datetime.fromtimestamp(model.modified).strftime("%Y-%m-%d %H:%M")
        size, beside = f"{model.num_bytes / 1e6:,.0f} MB", "yes" if model.has_statistics else "no"
        table.add_row(*map(printable, (model.name, size, when, model.weights, model.context, beside)))
    console = Console()
    if not console.is_terminal:  # one line for each, whoever reads it
        console.width = 10_000
    console.print(table, markup=False)
    for model in models:
        if model.wrong is not None:
            typer.echo(printable(f"{model.name}: it {model.wrong}"), err=True)
