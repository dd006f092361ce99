"""`kvreclaim bench vllm`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvreclaim.checks import check_choice
from kvreclaim.cli.bench_options import (
    Dtype,
    Json,
    Model,
    Threads,
    command_line,
    model_directory,
    ready,
)
from kvreclaim.cli.takes import names_in

PYTHON = Path(".vllm-env/bin/python")


def vllm(
    model: Model = None,
    cases: Annotated[str, typer.Option(help="small, large, cost; comma-separated.")] = "small,large,cost",
    policy: Annotated[str, typer.Option(help="Of the side with the plugin.")] = "query_mixture",
    interval: Annotated[int, typer.Option(min=1, help="Tokens.")] = 128,
    stats: Annotated[Path | None, typer.Option(help="Query statistics; the model's own where none.")] = None,
    vllm_python: Annotated[Path, typer.Option(help="Interpreter of vLLM's environment.")] = PYTHON,
    starts: Annotated[int, typer.Option(min=1, help="Of the processes of `cost`.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Of `cost`, in each start.")] = 24,
    threads: Threads = 1,
    dtype: Dtype = "bfloat16",
    plot: Annotated[Path | None, typer.Option(help="Write the pool over time to this image.")] = None,
    json_file: Json = None,
) -> None:
    """vLLM's pool with and without the plugin, and what the plugin costs where it does nothing."""
    with ready(threads):
        from kvreclaim.bench import common, vllm_chart, vllm_cost, vllm_pool

        wanted = names_in(cases)
        for name in wanted:
            check_choice("--cases", name, (*vllm_pool.CASES, "cost"))
        plan = vllm_pool.VllmPlan(
            model_directory(model), vllm_python, dtype, threads, policy=policy, interval=interval, stats=stats
        )
        console = common.wide_console(stderr=True)
        shapes = [vllm_pool.CASES[name] for name in wanted if name in vllm_pool.CASES]
        rows, versions = vllm_pool.run(plan, shapes, console)
        if rows:
            typer.echo(common.markdown(vllm_pool.HEADINGS, vllm_pool.pool_cells(rows)))
            typer.echo("\n" + "\n".join(vllm_pool.block_lines(rows)))
            if plot is not None:
                vllm_chart.pool_chart(rows, plot)

        def save(cost: list[common.Row]) -> None:
            content = common.report(rows, command_line(), peer_versions=versions, cost=cost)
            common.write_json(content, json_file)

        save([])  # cost takes long: what is known so far outlives a run that is stopped
        if "cost" in wanted:
            cost = vllm_cost.run(vllm_cost.CostPlan(plan, starts, rounds), console)
            typer.echo("\n" + common.markdown(vllm_cost.HEADINGS, vllm_cost.cost_cells(cost)))
            save(cost)
