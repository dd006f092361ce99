"""Run the demo from start to end."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvreclaim.demo.real import RealPlan, run_real
from kvreclaim.demo.report import DemoReport
from kvreclaim.demo.runs import DemoPlan, run_load, run_policies
from kvreclaim.demo.show import draw_real, draw_report, show_real, show_report
from kvreclaim.engine.api.llm import LLM
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.outputs import write_json


def run_demo(model: Path, plan: DemoPlan, console: Console, *, command: str) -> DemoReport:
    """Measure everything, with a progress bar on the console."""
    started = time.perf_counter()
    llm = LLM(
        model,
        num_blocks=plan.num_blocks,
        max_num_seqs=64,
        block_size=plan.block_size,
        max_model_len=plan.final_length,
        kv_cache_dtype=plan.kv_cache_dtype,
    )
    per_sequence = blocks_for(plan.final_length, plan.block_size)
    scorer = llm.sibling(num_blocks=per_sequence * plan.num_scored)
    console.print(llm.engine.kernels)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("warm up", total=len(plan.settings()) + 2)

        def on_progress(label: str) -> None:
            progress.update(task, description=label, advance=1)

        runs = run_policies(plan, llm, scorer, on_progress)
        load = run_load(plan, llm, on_progress)
    facts = llm.loaded.facts
    return DemoReport(
        command=command,
        model=facts.name,
        dtype=str(facts.dtype).removeprefix("torch."),
        device=facts.device.type,
        kernels=llm.engine.kernels,
        kv_cache_dtype=llm.engine.kv_format.name,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        kv_bytes_per_block=llm.engine.cache.bytes_per_block,
        final_length=plan.final_length,
        interval=plan.interval,
        sinks=plan.sinks,
        recent=plan.recent,
        elapsed_s=time.perf_counter() - started,
        runs=runs,
        load=load,
    )


def add_real(report: DemoReport, model: Path, plan: RealPlan, console: Console) -> None:
    """Let the demo end on a real model."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{model.name}: load", total=2 + len(plan.shares))
        report.real = run_real(model, plan, lambda label: progress.update(task, description=label, advance=1))
    report.elapsed_s += report.real.elapsed_s


def present(report: DemoReport, console: Console, out: Path, json_file: Path | None) -> None:
    """Print tables and charts; write the PNGs and, with a path, the JSON."""
    show_report(console, report)
    out.mkdir(parents=True, exist_ok=True)
    pictures = [out / "blocks_over_time.png"]
    draw_report(report, pictures[0])
    if report.real is not None:
        show_real(console, report.real)
        pictures.append(out / "real_model.png")
        draw_real(report.real, pictures[1])
    console.print(f"\ncharts: {', '.join(map(str, pictures))}")
    if json_file is not None:
        write_json(json_file, report.model_dump(mode="json"))
        console.print(f"figures: {json_file}")
    console.print(f"the demo took {report.elapsed_s:.0f} s")
