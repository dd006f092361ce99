"""Options that several commands share, and how a caller's mistake is reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from kvreclaim.errors import KVReclaimError

ModelOption = Annotated[
    str | None, typer.Option(help="Local directory or hub id; the demo model where none is named.")
]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Print one sentence and exit with 2 instead of a traceback."""
    try:
        yield
    except KVReclaimError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
