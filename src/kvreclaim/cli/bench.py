"""`kvreclaim bench ...`: each command verifies first, prints a table and writes one JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvreclaim.bench.plans import CompressPlan, DecodePlan, MemoryPlan
from kvreclaim.checks import require
from kvreclaim.cli.bench_latent import latent
from kvreclaim.cli.bench_options import (
    Json,
    Kernels,
    KVCacheDtypes,
    Model,
    Threads,
    beside_bf16,
    command_line,
    model_directory,
    ready,
)
from kvreclaim.cli.bench_prefix import prefix
from kvreclaim.cli.bench_serve import serve
from kvreclaim.cli.bench_vllm import vllm
from kvreclaim.cli.takes import Takes, takes, usage_errors

bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks: correctness first, then ratios of one run.")
bench_app.command("latent")(latent)
bench_app.command("prefix")(prefix)
bench_app.command("serve")(serve)
bench_app.command("vllm")(vllm)

SYSTEMS = ("full", "query_mixture", "triattention")
SHARED = ("threads", "dtype", "kernels")


@bench_app.command("blocks")
def blocks(json_file: Json = None) -> None:
    """Cost of block operations at 10^3, 10^5 and 10^6 blocks."""
    from kvreclaim.bench import blocks, common

    rows = blocks.run()
    blocks.print_table(rows)
    common.write_json({"runs": rows}, json_file)


@bench_app.command("decode")
@takes
def decode(
    plan: Annotated[dict[str, Any], Takes(config=DecodePlan, defaults={"systems": SYSTEMS}, build=dict)],
    model: Model = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check greedy tokens first.")] = True,
    growth: Annotated[
        bool, typer.Option("--growth", help="Also triattention at 8k and 64k logical tokens.")
    ] = False,
    json_file: Json = None,
) -> None:
    """Decode tokens/s over contexts and batches, beside transformers and vLLM."""
    decode_plan = _decode_plan(model, plan)
    with ready(decode_plan.threads):
        from kvreclaim.bench import common, decode, decode_table
        from kvreclaim.bench import growth as growth_bench
        from kvreclaim.bench.verify import agreement_table, as_rows

        result = decode.run(decode_plan, check=verify)
        if result.checks:
            common.show(agreement_table(result.checks))
        common.show(decode_table.speed_table(result.rows))
        common.show(decode_table.ratio_table(result.rows))
        extra = {"verification": as_rows(result.checks)}
        if growth:
            extra["growth"] = growth_bench.run(decode_plan)
            common.show(growth_bench.growth_table(extra["growth"]))
        content = common.report(result.rows, command_line(), peer_versions=result.versions, **extra)
        common.write_json(content, json_file)


@bench_app.command("memory")
@takes
def memory(
    plan: Annotated[dict[str, Any], Takes(config=MemoryPlan, build=dict)],
    model: Model = None,
    json_file: Json = None,
) -> None:
    """Long requests in one pool: how many at once, preemptions, time, peak blocks; beside vLLM."""
    memory_plan = MemoryPlan(model=model_directory(model), **plan)
    with ready(memory_plan.threads):
        from kvreclaim.bench import common, memory

        rows = memory.run(memory_plan, common.wide_console(stderr=True))
        common.show(memory.memory_table(rows))
        common.write_json(common.report(rows, command_line()), json_file)


@bench_app.command("compress")
@takes
def compress(
    base: Annotated[
        dict[str, Any], Takes(config=DecodePlan, only=(*SHARED, "budget", "interval"), build=dict)
    ],
    grid: Annotated[dict[str, Any], Takes(config=CompressPlan, build=dict)],
    model: Model = None,
    together: Annotated[int, typer.Option(min=0, help="Sequences due together; 0: leave it out.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Of passes that are due together.")] = 7,
    json_file: Json = None,
) -> None:
    """Cost of one compaction pass (score, select, move), its share of decoding, and of passes together."""
    plan = CompressPlan(_decode_plan(model, base), **grid)
    with ready(plan.base.threads):
        from kvreclaim.bench import common, compress
        from kvreclaim.bench import together as together_bench

        rows = compress.run(plan, common.wide_console(stderr=True))
        common.show(compress.compress_table(rows))
        due = together_bench.run(plan.base, plan.policies, together, rounds) if together else []
        common.show(together_bench.together_table(due))
        common.write_json(common.report(rows, command_line(), together=due), json_file)


@bench_app.command("kernels")
def kernels(
    kernels: Kernels = "auto",
    threads: Threads = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    kv_cache_dtype: KVCacheDtypes = "auto",
    ops: Annotated[str, typer.Option(help="Only those whose name contains this.")] = "",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    json_file: Json = None,
) -> None:
    """Time, GB/s and share of the bandwidth of every op, after comparing it with the reference."""
    with ready(threads):
        from kvreclaim.bench import common
        from kvreclaim.bench import kernels as kernel_bench
        from kvreclaim.bench.kernel_cases import standard

        cases = [case for case in standard(device, beside_bf16(kv_cache_dtype)) if ops in case.op]
        require(bool(cases), f"--ops is {ops!r}, which is in no op's name; pass, for example, decode.")
        rows, machine = kernel_bench.run(kernels, device=device, cases=cases, repeats=rounds)
        common.show(kernel_bench.rows_table(rows, machine))
        content = common.report(rows, command_line(), bandwidth=machine.row(), threads=threads)
        common.write_json(content, json_file)


@bench_app.command("step")
@takes
def step(
    plan: Annotated[
        dict[str, Any],
        Takes(
            config=DecodePlan,
            only=("systems", "contexts", "batches", *SHARED),
            defaults={"systems": ("full", "triattention"), "contexts": (1024, 16384), "batches": (1, 8)},
            build=dict,
        ),
    ],
    model: Model = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed at each point.")] = 64,
    json_file: Json = None,
) -> None:
    """Where a decode step's time goes: schedule, batch, model, attention, sample, compress."""
    decode_plan = _decode_plan(model, {**plan, "steps": 2 * steps})
    with ready(decode_plan.threads):
        from kvreclaim.bench import common, step

        rows = step.run(decode_plan, steps=steps)
        common.show(step.step_table(rows))
        common.write_json(common.report(rows, command_line()), json_file)


@bench_app.command("plot")
def plot(
    files: Annotated[list[Path], typer.Argument(help="Results of `bench decode`.")],
    out: Annotated[Path, typer.Option(help="The image to write.")] = Path("docs/decode_speed.png"),
) -> None:
    """Chart decode speed over the context from result files."""
    with usage_errors():
        from kvreclaim.bench.plot import decode_chart

        decode_chart(files, out)


def _decode_plan(model: Path | None, given: dict[str, Any]) -> DecodePlan:
    """given: fields; systems by the names of their policies. Raises: InvalidArgumentError."""
    if "systems" in given:
        given = {**given, "systems": tuple(f"kvreclaim-{name}" for name in given["systems"])}
    return DecodePlan(model=model_directory(model), **given)
