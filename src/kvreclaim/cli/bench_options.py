"""What the commands of `kvreclaim bench` share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvreclaim.checks import require
from kvreclaim.cli.takes import usage_errors
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
VllmPython = Annotated[Path | None, typer.Option(help="Interpreter of vLLM's environment (`make vllm-env`).")]


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


def numbers(option: str, value: str) -> tuple[int, ...]:
    """Comma-separated integers. Raises: InvalidArgumentError."""
    try:
        return tuple(int(part) for part in value.split(",") if part)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{option} is {value!r}, which is no list of numbers; pass, for example, 1024,8192."
        ) from error


def formats_in(value: str) -> tuple[str, ...]:
    """Comma-separated KV formats, each once. Raises: InvalidArgumentError."""
    from kvreclaim.config import format_name

    require(
        bool(names_in(value)),
        f"--kv-cache-dtype is {value!r}, which names no format; pass auto or, for example, bf16,int8,int4.",
    )
    return tuple(dict.fromkeys(format_name(name) for name in names_in(value)))


def beside_bf16(value: str) -> tuple[str, ...]:
    """The same; with bf16, which named formats are compared with, if it is not among them."""
    formats = formats_in(value)
    return formats if formats == ("auto",) or "bf16" in formats else ("bf16", *formats)


def names_in(value: str) -> list[str]:
    """Comma-separated names."""
    return [part.strip() for part in value.split(",") if part.strip()]


def command_line() -> str:
    """The command line as it was given."""
    return shlex.join(["kvreclaim", *sys.argv[1:]])
