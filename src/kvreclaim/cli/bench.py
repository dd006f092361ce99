"""`kvreclaim bench ...`: each command verifies first, prints a table and writes one JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvreclaim.checks import check_choice, require
from kvreclaim.cli.bench_latent import latent
from kvreclaim.cli.bench_options import (
    Dtype,
    Json,
    Kernels,
    KVCacheDtypes,
    Model,
    Threads,
    VllmPython,
    beside_bf16,
    command_line,
    formats_in,
    model_directory,
    names_in,
    numbers,
    ready,
)
from kvreclaim.cli.bench_prefix import prefix
from kvreclaim.cli.bench_serve import serve
from kvreclaim.cli.bench_vllm import vllm
from kvreclaim.cli.takes import usage_errors

bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks: correctness first, then ratios of one run.")
bench_app.command("latent")(latent)
bench_app.command("prefix")(prefix)
bench_app.command("serve")(serve)
bench_app.command("vllm")(vllm)

SYSTEMS = "full,query_mixture,triattention"


@bench_app.command("blocks")
def blocks(json_file: Json = None) -> None:
    """Cost of block operations at 10^3, 10^5 and 10^6 blocks."""
    from kvreclaim.bench import blocks, common

    rows = blocks.run()
    blocks.print_table(rows)
    common.write_json({"runs": rows}, json_file)


@bench_app.command("decode")
def decode(
    model: Model = None,
    systems: Annotated[str, typer.Option(help="kvreclaim's own, comma-separated.")] = SYSTEMS,
    peers: Annotated[str, typer.Option(help="transformers, transformers-cb, vllm; comma-separated.")] = "",
    vllm_python: VllmPython = None,
    vllm_compile: Annotated[bool, typer.Option("--vllm-compile", help="vLLM with torch.compile.")] = False,
    contexts: Annotated[str, typer.Option(help="Tokens in each cache.")] = "1024,8192,16384,32768",
    batches: Annotated[str, typer.Option(help="Sequences.")] = "1,8,32",
    threads: Threads = 2,
    dtype: Dtype = "bfloat16",
    kernels: Kernels = "auto",
    kv_cache_dtype: KVCacheDtypes = "auto",
    budget: Annotated[int, typer.Option(help="Of the policies, tokens.")] = 2048,
    interval: Annotated[int, typer.Option(help="Of the policies, tokens.")] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Most steps of a timed slice.")] = 64,
    slice_s: Annotated[float, typer.Option(help="Most seconds of a timed slice.")] = 4.0,
    limit_s: Annotated[float, typer.Option(help="Most seconds of one system at one point.")] = 120.0,
    fill: Annotated[str, typer.Option(help="synthetic or prefill.")] = "synthetic",
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check greedy tokens first.")] = True,
    growth: Annotated[
        bool, typer.Option("--growth", help="Also triattention at 8k and 64k logical tokens.")
    ] = False,
    json_file: Json = None,
) -> None:
    """Decode tokens/s over contexts and batches, beside transformers and vLLM."""
    with ready(threads):
        from kvreclaim.bench import common, decode, decode_table
        from kvreclaim.bench import growth as growth_bench
        from kvreclaim.bench.decode_plan import DecodePlan
        from kvreclaim.bench.verify import agreement_table, as_rows

        plan = DecodePlan(
            model=model_directory(model),
            dtype=dtype,
            threads=threads,
            contexts=numbers("--contexts", contexts),
            batches=numbers("--batches", batches),
            systems=tuple(f"kvreclaim-{name}" for name in names_in(systems)),
            peers=tuple(names_in(peers)),
            vllm_python=vllm_python,
            vllm_eager=not vllm_compile,
            kernels=kernels,
            kv_cache_dtypes=formats_in(kv_cache_dtype),
            budget=budget,
            interval=interval,
            rounds=rounds,
            steps=steps,
            slice_s=slice_s,
            limit_s=limit_s,
            fill=_fill(fill),
        )
        result = decode.run(plan, check=verify)
        if result.checks:
            common.show(agreement_table(result.checks))
        common.show(decode_table.speed_table(result.rows))
        common.show(decode_table.ratio_table(result.rows))
        extra = {"verification": as_rows(result.checks)}
        if growth:
            extra["growth"] = growth_bench.run(plan)
            common.show(growth_bench.growth_table(extra["growth"]))
        content = common.report(result.rows, command_line(), peer_versions=result.versions, **extra)
        common.write_json(content, json_file)


@bench_app.command("memory")
def memory(
    model: Model = None,
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = "full,triattention,query_mixture",
    requests: Annotated[int, typer.Option(help="Sent at once.")] = 20,
    prompt: Annotated[int, typer.Option(help="Tokens of each.")] = 2048,
    output: Annotated[int, typer.Option(help="Tokens of each.")] = 8192,
    pool: Annotated[int, typer.Option(help="Whole requests whose K/V the pool holds.")] = 4,
    budget: Annotated[int, typer.Option(help="Of the policies, tokens.")] = 2048,
    interval: Annotated[int, typer.Option(help="Of the policies, tokens.")] = 128,
    vllm_python: VllmPython = None,
    threads: Threads = 2,
    dtype: Dtype = "bfloat16",
    kernels: Kernels = "auto",
    json_file: Json = None,
) -> None:
    """Long requests in one pool: how many at once, preemptions, time, peak blocks; beside vLLM."""
    with ready(threads):
        from kvreclaim.bench import common, memory

        plan = memory.MemoryPlan(
            model=model_directory(model),
            dtype=dtype,
            threads=threads,
            requests=requests,
            prompt=prompt,
            output=output,
            pool_requests=pool,
            policies=tuple(names_in(policies)),
            budget=budget,
            interval=interval,
            kernels=kernels,
            vllm_python=vllm_python,
        )
        rows = memory.run(plan, common.wide_console(stderr=True))
        common.show(memory.memory_table(rows))
        common.write_json(common.report(rows, command_line()), json_file)


@bench_app.command("compress")
def compress(
    model: Model = None,
    policies: Annotated[str, typer.Option(help="Comma-separated.")] = "triattention,query_mixture",
    contexts: Annotated[str, typer.Option(help="At budget 2048.")] = "8192,32768,131072",
    budgets: Annotated[str, typer.Option(help="At --budget-context.")] = "512,2048,8192",
    budget_context: Annotated[int, typer.Option(help="Tokens.")] = 32_768,
    batches: Annotated[str, typer.Option(help="Sequences.")] = "1",
    budget: Annotated[int, typer.Option(help="At which the contexts are varied.")] = 2048,
    interval: Annotated[int, typer.Option(help="Tokens.")] = 128,
    together: Annotated[int, typer.Option(min=0, help="Sequences due together; 0: leave it out.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Of passes that are due together.")] = 7,
    threads: Threads = 2,
    dtype: Dtype = "bfloat16",
    kernels: Kernels = "auto",
    json_file: Json = None,
) -> None:
    """Cost of one compaction pass (score, select, move), its share of decoding, and of passes together."""
    with ready(threads):
        from kvreclaim.bench import common, compress
        from kvreclaim.bench import together as together_bench
        from kvreclaim.bench.decode_plan import DecodePlan

        base = DecodePlan(
            model_directory(model),
            dtype=dtype,
            threads=threads,
            budget=budget,
            interval=interval,
            kernels=kernels,
        )
        plan = compress.CompressPlan(
            base,
            contexts=numbers("--contexts", contexts),
            budgets=numbers("--budgets", budgets),
            batches=numbers("--batches", batches),
            policies=tuple(names_in(policies)),
            budget_context=budget_context,
        )
        rows = compress.run(plan, common.wide_console(stderr=True))
        common.show(compress.compress_table(rows))
        due = together_bench.run(base, plan.policies, together, rounds) if together else []
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
def step(
    model: Model = None,
    systems: Annotated[str, typer.Option(help="kvreclaim's own, comma-separated.")] = "full,triattention",
    contexts: Annotated[str, typer.Option(help="Tokens in each cache.")] = "1024,16384",
    batches: Annotated[str, typer.Option(help="Sequences.")] = "1,8",
    steps: Annotated[int, typer.Option(min=1, help="Timed at each point.")] = 64,
    threads: Threads = 2,
    dtype: Dtype = "bfloat16",
    kernels: Kernels = "auto",
    json_file: Json = None,
) -> None:
    """Where a decode step's time goes: schedule, batch, model, attention, sample, compress."""
    with ready(threads):
        from kvreclaim.bench import common, step
        from kvreclaim.bench.decode_plan import DecodePlan

        plan = DecodePlan(
            model_directory(model),
            dtype=dtype,
            threads=threads,
            systems=tuple(f"kvreclaim-{name}" for name in names_in(systems)),
            contexts=numbers("--contexts", contexts),
            batches=numbers("--batches", batches),
            kernels=kernels,
            steps=2 * steps,
        )
        rows = step.run(plan, steps=steps)
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


def _fill(value: str) -> Literal["synthetic", "prefill"]:
    check_choice("--fill", value, ("synthetic", "prefill"))
    return "prefill" if value == "prefill" else "synthetic"
