"""Options that several commands share, and how a caller's mistake is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any

import typer

from kvreclaim.errors import KVReclaimError

ENGINE, SAMPLING, COMPRESSION = "engine", "sampling", "KV compression"


def _option(panel: str, *names: str, **facts: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **facts)


ModelOption = Annotated[
    str | None, typer.Option(help="Local directory or hub id; the demo model where none is named.")
]
DType = Annotated[str, _option(ENGINE, help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, _option(ENGINE, help="auto, cpu or cuda.")]
Kernels = Annotated[str, _option(ENGINE, help="auto, native, triton or reference.")]
KVCacheDType = Annotated[
    str,
    _option(
        ENGINE,
        help="auto (the model's own), fp32, bf16, fp16, fp8_e4m3 (fp8), int8, int4, kivi4 or turboquant4.",
    ),
]
EngineInt = Annotated[int, _option(ENGINE)]
EngineLimit = Annotated[int | None, _option(ENGINE)]
NumBlocks = Annotated[int | None, _option(ENGINE, "--num-blocks", "--num-gpu-blocks-override")]
KVMemoryFraction = Annotated[
    float,
    _option(
        ENGINE,
        "--kv-memory-fraction",
        "--gpu-memory-utilization",
        help="Of the free memory, for blocks at most.",
    ),
]
EnforceEager = Annotated[bool, _option(ENGINE, "--enforce-eager", help="On CUDA, no CUDA graphs.")]
PrefixCaching = Annotated[bool, _option(ENGINE, "--enable-prefix-caching/--no-enable-prefix-caching")]
SamplingInt = Annotated[int, _option(SAMPLING)]
SamplingLimit = Annotated[int | None, _option(SAMPLING)]
SamplingNumber = Annotated[float, _option(SAMPLING)]
Stop = Annotated[list[str] | None, _option(SAMPLING)]
IgnoreEos = Annotated[bool, _option(SAMPLING, "--ignore-eos")]
Policy = Annotated[str | None, _option(COMPRESSION, help="Policy; the KV cache stays whole without.")]
Budget = Annotated[int | None, _option(COMPRESSION, help="Tokens kept.")]
CompressionInt = Annotated[int | None, _option(COMPRESSION)]
CompressionText = Annotated[str | None, _option(COMPRESSION)]
ProtectPrompt = Annotated[bool, _option(COMPRESSION, "--kv-protect-prompt")]


def fields_of(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are called like a field of this dataclass."""
    return {field.name: given[field.name] for field in fields(config) if field.name in given}


@contextmanager
def usage_errors() -> Iterator[None]:
    """Print one sentence and exit with 2 instead of a traceback."""
    try:
        yield
    except KVReclaimError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
