"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.cli.uncollected import uncollected
from kvreclaim.compression_settings import CompressionSettings
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError, printable
from kvreclaim.options import COMPRESSION, MODEL
from kvreclaim.outputs import check_writable

if TYPE_CHECKING:
    from kvreclaim import LLM, CompressionConfig

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".webp")
SAMPLING = "Sampling"

DEMO = "demo"
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Model: a directory, a .gguf file, a hub id, a name that `kvreclaim ls` prints, or "
        f"{DEMO}. Default: the model that `kvreclaim fetch` downloaded, else the demo model.",
    ),
]
DType = Annotated[
    str, typer.Option(rich_help_panel=MODEL, help="Model dtype: auto, float32, bfloat16 or float16.")
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")]


def writable(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything has run."""
    try:
        if path is not None:
            check_writable(path)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    return path


def folder(path: Path) -> Path:
    """Check a folder that files are written to, as `writable` does."""
    writable(path / "file")
    return path


def picture(path: Path | None) -> Path | None:
    """Check a file that a chart is written to: writable, and in a format that charts are drawn in."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"{str(path)!r} is no image; end its name with {', '.join(PICTURES)}.")
    return writable(path)


Figures = Annotated[
    Path | None, typer.Option("--json", help="Write all results to this JSON file.", callback=writable)
]


def tell(line: str) -> None:
    typer.echo(printable(line), err=True)


def starting(calibrates: bool) -> AbstractContextManager[None]:
    """Imports and loading without garbage collection. A start that calibrates makes garbage, too, and is left
    alone."""
    return nullcontext() if calibrates else uncollected()


def compression_of(**settings: Any) -> CompressionConfig | None:
    """Return the config of these settings; None without any, which imports no torch."""
    if not settings:
        return None
    with uncollected():
        from kvreclaim import CompressionConfig

    return CompressionConfig(**settings)


def with_calibration(
    compression: CompressionConfig | None, calibrates: bool, say: Callable[[str], object] = tell
) -> tuple[CompressionConfig | None, Callable[[LLM], object] | None]:
    """Return LLM's `compression`, which is auto for calibration alone, and its `calibrate`."""
    if not calibrates:
        return compression, None
    from kvreclaim import CompressionConfig
    from kvreclaim.calibrate.statistics import calibrate_at_start

    compression = compression or CompressionConfig()
    return compression, None if compression.stats is not None else partial(calibrate_at_start, say=say)


def compression_line(llm: LLM, config: CompressionConfig) -> str:
    """Policy and budget, and the KV cache dtype where the budget is in bytes."""
    form = f"; KV cache in {llm.engine.kv_format.name}" if config.is_of_prompt else ""
    return f"compression: {config.in_words}{form}"


Calibrate = Annotated[
    bool,
    typer.Option(
        "--kv-compression-calibrate",
        help="Calibrate a model without statistics at the start (minutes). They are kept in the cache "
        "directory.",
    ),
]
Compression = ConfigOptions(config=CompressionSettings, panel=COMPRESSION, unset=True, build=compression_of)
THREADS = {"threads": 0}
"""Default of interactive commands."""
KVCacheDType = ConfigOptions(config=EngineConfig, only=("kv_cache_dtype",))
