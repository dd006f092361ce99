"""What the commands of `kvreclaim bench` share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvreclaim.cli.takes import names_in, usage_errors
from kvreclaim.config import format_names
from kvreclaim.errors import InvalidArgumentError

Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
Model = Annotated[
    Path | None,
    typer.Option(help="Model directory; the 26 M model of `make bench-model` where none is named."),
]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads, of every system.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]
Kernels = Annotated[str, typer.Option(help="kvreclaim's kernels: auto, reference, native or triton.")]
KVCacheDtypes = Annotated[
    str, typer.Option(help="KV formats, comma-separated, timed in turns: auto, bf16, int8, int4 and so on.")
]


@contextmanager
def ready(threads: int) -> Iterator[None]:
    """Threads set, no progress bars, a caller's mistake in one sentence."""
    with usage_errors():
        import torch

        from kvreclaim.model.loader import hide_progress_bars

        torch.set_num_threads(threads)
        hide_progress_bars()
        yield


def model_directory(given: Path | None) -> Path:
    """The one given, or the 26 M model. Raises: InvalidArgumentError if it is no directory."""
    from kvreclaim.bench.common import DEFAULT_MODEL

    model = given or DEFAULT_MODEL
    if not model.is_dir():
        raise InvalidArgumentError(
            f"--model is {str(model)!r}, which is no directory; run `make bench-model`, or name another one."
        )
    return model


def formats_in(value: str) -> tuple[str, ...]:
    """Comma-separated KV formats, each once. Raises: InvalidArgumentError."""
    return format_names(names_in(value))


def beside_bf16(value: str) -> tuple[str, ...]:
    """The same; with bf16, which named formats are compared with, if it is not among them."""
    formats = formats_in(value)
    return formats if formats == ("auto",) or "bf16" in formats else ("bf16", *formats)


def command_line() -> str:
    """The command line as it was given."""
    return shlex.join(["kvreclaim", *sys.argv[1:]])
