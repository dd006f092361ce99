"""`kvreclaim bench ...`: each command verifies first, prints a table and writes one JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.plans import (
    KERNELS,
    THREADS,
    LosslessPlan,
    ServePlan,
    VllmPlan,
)
from kvreclaim.checks import require
from kvreclaim.cli.bench_options import Json, publish, ready
from kvreclaim.cli.config_options import ConfigOptions, names_in, with_config
from kvreclaim.cli.help import CommandApp
from kvreclaim.config import format_names

bench_app = CommandApp(
    no_args_is_help=True,
    help="Benchmarks. Each checks correctness first, then compares speeds within one run.",
)

SYSTEMS = ("full", "query_mixture", "triattention")
SHARED = ("model", "threads", "dtype", "kernels")


def decode_plan(**given: Any) -> DecodePlan:
    """given: fields; systems by the names of their policies. Raises: InvalidArgumentError."""
    if "systems" in given:
        given["systems"] = tuple(f"kvreclaim-{name}" for name in given["systems"])
    return DecodePlan(**given)


@bench_app.command("decode")
@with_config
def decode(
    plan: Annotated[
        DecodePlan, ConfigOptions(config=DecodePlan, defaults={"systems": SYSTEMS}, build=decode_plan)
    ],
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check greedy tokens first.")] = True,
    json_file: Json = None,
) -> None:
    """Measure decode speed over contexts and batches, beside transformers, vLLM and llama.cpp."""
    with ready(plan.threads):
        from kvreclaim.bench import decode, decode_table
        from kvreclaim.bench.verify import agreement_table

        result = decode.run(plan, check=verify)
        checks = [check.row() for check in result.checks]
        tables = [agreement_table(checks)] if checks else []
        tables += [decode_table.speed_table(result.prompts)] if result.prompts else []
        tables += [decode_table.speed_table(result.rows), decode_table.ratio_table(result.rows)]
        more = {"verification": checks, "prompts": result.prompts}
        publish(result.rows, tables, json_file, peer_versions=result.versions, **more)


@bench_app.command("verify")
@with_config
def verify(plan: Annotated[LosslessPlan, ConfigOptions(config=LosslessPlan)], json_file: Json = None) -> None:
    """Compare verify mode with the full and the compressed cache: speed, blocks, bytes, equal answers."""
    with ready(plan.threads):
        from kvreclaim.bench import common, lossless
        from kvreclaim.eval.demo_tasks import unfinished

        rows = lossless.run(plan, common.wide_console(stderr=True), unfinished)
        publish(rows, [lossless.speed_table(rows)], json_file)


@bench_app.command("kernels")
def kernels(
    kernels: Annotated[str, typer.Option(help=KERNELS)] = "auto",
    threads: Annotated[int, typer.Option(min=1, max=1024, help=THREADS)] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="KV formats, comma-separated, timed in turns with bf16, or auto.")
    ] = "auto",
    ops: Annotated[str, typer.Option(help="Only ops whose name contains this.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians are shown.")] = 5,
    json_file: Json = None,
) -> None:
    """Measure every op: time, GB/s and share of the bandwidth, after a check against the reference."""
    with ready(threads):
        from kvreclaim.bench import kernels as kernel_bench
        from kvreclaim.bench.kernel_cases import standard

        formats = format_names(names_in(kv_cache_dtype))
        if formats != ("auto",) and "bf16" not in formats:
            formats = ("bf16", *formats)
        cases = [case for case in standard(device, formats) if ops in case.op]
        require(bool(cases), f"--ops is {ops!r}, which is in no op's name; pass, for example, decode.")
        rows, machine = kernel_bench.run(kernels, device=device, cases=cases, repeats=rounds)
        tables = [kernel_bench.rows_table(rows, machine)]
        publish(rows, tables, json_file, bandwidth=machine.row(), threads=threads)


@bench_app.command("serve")
@with_config
def serve(plan: Annotated[ServePlan, ConfigOptions(config=ServePlan)], json_file: Json = None) -> None:
    """Measure throughput and latency over HTTP, beside the engine alone and llama.cpp's server."""
    with ready(plan.threads):
        from kvreclaim.bench import serve
        from kvreclaim.bench.verify import agreement_table

        rows, found = serve.run(plan)
        checks = [check.row() for check in found]
        tables = [agreement_table(checks)] if checks else []
        publish(rows, [*tables, serve.serve_table(rows)], json_file, verification=checks)


@bench_app.command("vllm")
@with_config
def vllm(plan: Annotated[VllmPlan, ConfigOptions(config=VllmPlan)], json_file: Json = None) -> None:
    """Run vLLM with and without the plugin: `vllm bench serve` against servers with equal pools."""
    if plan.gpu_check:
        return _gpu_check(plan, json_file)
    with ready(plan.threads):
        from kvreclaim.bench import common, vllm_plugin

        console, rows = common.wide_console(stderr=True), list[dict[str, Any]]()
        for case in plan.cases:  # long: the results up to here outlive a run that is stopped
            own = vllm_plugin.run(plan, case, console)
            rows += own
            typer.echo(vllm_plugin.plugin_table(own) + "\n")
            publish(rows, [], json_file)
        if plan.plot is not None:
            vllm_plugin.pool_chart(rows, plan.plot)


def _gpu_check(plan: VllmPlan, json_file: Path | None) -> None:
    with ready(plan.threads):
        from kvreclaim.bench import common, vllm_check

        rows, versions = vllm_check.run(plan, common.wide_console(stderr=True))
        typer.echo(vllm_check.check_page(rows))
        page = json_file or vllm_check.PAGE
        publish(rows, [], page, peer_versions=versions)
        typer.echo(f"\nWritten to {page}.")
        if not vllm_check.passed(rows):
            raise typer.Exit(1)
