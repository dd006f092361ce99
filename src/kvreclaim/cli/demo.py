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
    import torch

    from kvreclaim.demo.main import add_real, present, run_demo
    from kvreclaim.demo.real import RealPlan
    from kvreclaim.demo.runs import DemoPlan
    from kvreclaim.model.loader import hide_progress_bars

    console = Console()
    all_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    hide_progress_bars()
    chosen = engine.kv_cache_dtype
    option = "" if chosen == "auto" else f" --kv-cache-dtype {chosen}"
    report = run_demo(
        demo_model(), DemoPlan(kv_cache_dtype=chosen), console, command=f"kvreclaim demo{option}"
    )
    real = real_model()
    if real is None:
        console.print(
            "No real language model is here; `make real-model` brings the one that the demo ends on."
        )
    else:
        torch.set_num_threads(all_threads)
        add_real(report, real, RealPlan(), console)
    present(report, console, out, json_file)
