"""`kvreclaim bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvreclaim.cli.bench_options import (
    Json,
    Model,
    Threads,
    command_line,
    model_directory,
    numbers,
    ready,
)


def serve(
    model: Model = None,
    streams: Annotated[str, typer.Option(help="Concurrent streams.")] = "1,8,32,64",
    prompt: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 64,
    output: Annotated[int, typer.Option(min=1, help="Generated tokens of each.")] = 256,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Threads = 1,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    num_blocks: Annotated[int, typer.Option(min=1, help="Of the pool, on both sides.")] = 4096,
    arrivals: Annotated[int, typer.Option(min=0, help="Requests of a run under load; 0: none.")] = 0,
    load: Annotated[float, typer.Option(help="Of that run: share of what the engine can do offline.")] = 0.7,
    trace: Annotated[
        Path | None, typer.Option(help="CSV with TIMESTAMP,ContextTokens,GeneratedTokens: their lengths.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Of the trace's lengths.")] = 0.1,
    json_file: Json = None,
) -> None:
    """Throughput and time to first token through HTTP, beside the engine alone."""
    with ready(threads):
        from kvreclaim.bench import common
        from kvreclaim.bench import serve as bench

        plan = bench.ServePlan(
            model=model_directory(model),
            streams=numbers("--streams", streams),
            num_prompt=prompt,
            num_output=output,
            rounds=rounds,
            threads=threads,
            dtype=dtype,
            num_blocks=num_blocks,
            arrivals=arrivals,
            load=load,
            trace=trace,
            scale=scale,
        )
        rows = bench.run(plan)
        common.show(bench.serve_table(rows))
        common.write_json(common.report(rows, command_line()), json_file)
