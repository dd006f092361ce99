"""`kvreclaim demo`: what compression does to memory and accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvreclaim import demo_model, real_model
from kvreclaim.cli.config_options import with_config
from kvreclaim.cli.options import Figures, KVCacheDType, folder
from kvreclaim.config import EngineConfig


@with_config
def demo(
    engine: Annotated[EngineConfig, KVCacheDType],
    json_file: Figures = None,
    out: Annotated[Path, typer.Option(help="Directory for the chart.", callback=folder)] = Path("demo_out"),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for the demo model.")] = 1,
) -> None:
    """Show what eviction, compaction and learned scores do to memory and accuracy, on the demo model and on
    the model that `kvreclaim fetch` downloaded."""
    from kvreclaim.demo.main import run_demo
    from kvreclaim.demo.real import RealPlan
    from kvreclaim.demo.toy import DemoPlan
    from kvreclaim.model.loader import hide_progress_bars

    hide_progress_bars()
    model = real_model()
    run_demo(
        (demo_model(), DemoPlan(kv_cache_dtype=engine.kv_cache_dtype)),
        None if model is None else (model, RealPlan()),
        Console(),
        out,
        json_file,
        threads=threads,
    )
