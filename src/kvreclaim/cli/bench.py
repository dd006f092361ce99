"""`kvreclaim bench ...`: each command verifies first, prints a table and writes one JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvreclaim.bench.lossless.plan import LosslessPlan
from kvreclaim.bench.packed.plan import PackedPlan
from kvreclaim.bench.plans import (
    KERNELS,
    THREADS,
    BeamsPlan,
    ChunksPlan,
    CompressPlan,
    DecodePlan,
    LatentPlan,
    MemoryPlan,
    PrefillPlan,
    PrefixPlan,
    ServePlan,
)
from kvreclaim.bench.tiers.plan import TiersPlan
from kvreclaim.bench.vllm_plan import VllmPlan
from kvreclaim.checks import require
from kvreclaim.cli.bench_options import Json, publish, ready
from kvreclaim.cli.config_options import ConfigOptions, names_in, usage_errors, with_config
from kvreclaim.cli.options import picture
from kvreclaim.config import format_names
from kvreclaim.outputs import write_json
from kvreclaim.sim.groups import GroupsPlan
from kvreclaim.sim.order import OrderPlan

bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks: correctness first, then ratios of one run.")

SYSTEMS = ("full", "query_mixture", "triattention")
SHARED = ("model", "threads", "dtype", "kernels")


def _decode_plan(**given: Any) -> DecodePlan:
    """given: fields; systems by the names of their policies. Raises: InvalidArgumentError."""
    if "systems" in given:
        given["systems"] = tuple(f"kvreclaim-{name}" for name in given["systems"])
    return DecodePlan(**given)


@bench_app.command("blocks")
@with_config
def blocks(json_file: Json = None) -> None:
    """Cost of block operations at 10^3, 10^5 and 10^6 blocks."""
    from kvreclaim.bench import blocks, common

    rows = blocks.run()
    common.show(blocks.blocks_table(rows))
    if json_file is not None:
        write_json(json_file, {"runs": rows})


@bench_app.command("decode")
@with_config
def decode(
    plan: Annotated[
        DecodePlan, ConfigOptions(config=DecodePlan, defaults={"systems": SYSTEMS}, build=_decode_plan)
    ],
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check greedy tokens first.")] = True,
    growth: Annotated[
        bool, typer.Option("--growth", help="Also triattention at 8k and 64k logical tokens.")
    ] = False,
    json_file: Json = None,
) -> None:
    """Decode tokens/s over contexts and batches, beside transformers and vLLM."""
    with ready(plan.threads):
        from kvreclaim.bench import decode, decode_table
        from kvreclaim.bench import growth as growth_bench
        from kvreclaim.bench.verify import agreement_table

        result = decode.run(plan, check=verify)
        checks = [check.row() for check in result.checks]
        tables = [agreement_table(checks)] if checks else []
        tables += [decode_table.speed_table(result.rows), decode_table.ratio_table(result.rows)]
        extra: dict[str, Any] = {"verification": checks}
        if growth:
            extra["growth"] = growth_bench.run(plan)
            tables.append(growth_bench.growth_table(extra["growth"]))
        publish(result.rows, tables, json_file, peer_versions=result.versions, **extra)


@bench_app.command("verify")
@with_config
def verify(plan: Annotated[LosslessPlan, ConfigOptions(config=LosslessPlan)], json_file: Json = None) -> None:
    """Verify mode beside the full cache and the lossy one: tokens first, then tokens/s, blocks, bytes."""
    with ready(plan.threads):
        from kvreclaim.bench import common
        from kvreclaim.bench.lossless import equality, speed
        from kvreclaim.eval.demo_tasks import documents, unfinished

        compared = equality.run(list(documents(plan.documents))) if plan.documents else []
        rows = speed.run(plan, common.wide_console(stderr=True), unfinished)
        tables = [equality.equality_table(compared)] if compared else []
        tables += [speed.speed_table(rows)] if rows else []
        publish(rows, tables, json_file, equality=compared)


@bench_app.command("memory")
@with_config
def memory(plan: Annotated[MemoryPlan, ConfigOptions(config=MemoryPlan)], json_file: Json = None) -> None:
    """Long requests in one pool: how many at once, preemptions, time, peak blocks; beside vLLM."""
    with ready(plan.threads):
        from kvreclaim.bench import common, memory

        rows = memory.run(plan, common.wide_console(stderr=True))
        publish(rows, [memory.memory_table(rows)], json_file)


@bench_app.command("compress")
@with_config
def compress(
    base: Annotated[
        DecodePlan,
        ConfigOptions(config=DecodePlan, only=(*SHARED, "budget", "interval")),
    ],
    grid: Annotated[dict[str, Any], ConfigOptions(config=CompressPlan, build=dict)],
    json_file: Json = None,
) -> None:
    """Cost of one compaction pass (score, select, move), its share of decoding, and of passes together."""
    plan = CompressPlan(base, **grid)
    with ready(base.threads):
        from kvreclaim.bench import common, compress, together

        rows = compress.run(plan, common.wide_console(stderr=True))
        due = together.run(plan)
        publish(rows, [compress.compress_table(rows), together.together_table(due)], json_file, together=due)


@bench_app.command("groups")
@with_config
def groups(plan: Annotated[GroupsPlan, ConfigOptions(config=GroupsPlan)], json_file: Json = None) -> None:
    """Memory of layers with sliding windows in tables of their own, and what conversations hit there."""
    from kvreclaim.bench import groups as shown
    from kvreclaim.sim import groups

    memory, hits = groups.memory_rows(), groups.hit_rows(plan)
    publish(memory, [shown.memory_table(memory), shown.hits_table(hits)], json_file, hits=hits)


@bench_app.command("kernels")
def kernels(
    kernels: Annotated[str, typer.Option(help=KERNELS)] = "auto",
    threads: Annotated[int, typer.Option(min=1, max=1024, help=THREADS)] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="KV formats, comma-separated, timed in turns with bf16, or auto.")
    ] = "auto",
    ops: Annotated[str, typer.Option(help="Only those whose name contains this.")] = "",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    json_file: Json = None,
) -> None:
    """Time, GB/s and share of the bandwidth of every op, after comparing it with the reference."""
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


@bench_app.command("latent")
@with_config
def latent(plan: Annotated[LatentPlan, ConfigOptions(config=LatentPlan)], json_file: Json = None) -> None:
    """Prefill at DeepSeek-V3's head dims: absorbed queries, expanded keys, and which of them is taken."""
    with ready(plan.threads):
        from kvreclaim.bench import latent

        rows = latent.run(plan)
        publish(rows, [latent.latent_table(rows)], json_file, threads=plan.threads)


@bench_app.command("order")
@with_config
def order(plan: Annotated[OrderPlan, ConfigOptions(config=OrderPlan)], json_file: Json = None) -> None:
    """First tokens and work under fcfs, longest prefix first and cache, in simulations of three traces."""
    from kvreclaim.bench import order as shown
    from kvreclaim.sim import order

    rows = order.run(plan)
    ratios = order.ratios(rows)
    publish(rows, [shown.order_table(rows), shown.ratio_table(ratios)], json_file, ratios=ratios)


@bench_app.command("prefix")
@with_config
def prefix(plan: Annotated[PrefixPlan, ConfigOptions(config=PrefixPlan)], json_file: Json = None) -> None:
    """Prefix hit rates of a block-hash trace, by eviction order and size of the cache."""
    from kvreclaim.bench import common, prefix, prefix_pins

    rows = prefix.run(plan, common.wide_console(stderr=True).print)
    tables, extra = [prefix.prefix_table(rows, plan.trace)], {}
    if plan.pins:
        extra["pins"] = prefix_pins.run(plan.trace, plan.sizes)
        tables.append(prefix_pins.pins_table(extra["pins"]))
    publish(rows, tables, json_file, trace=plan.trace.name, **extra)


@bench_app.command("serve")
@with_config
def serve(plan: Annotated[ServePlan, ConfigOptions(config=ServePlan)], json_file: Json = None) -> None:
    """Throughput, time to first token and between tokens through HTTP, beside the engine alone."""
    with ready(plan.threads):
        from kvreclaim.bench import serve

        rows = serve.run(plan)
        publish(rows, [serve.serve_table(rows)], json_file)


@bench_app.command("step")
@with_config
def step(
    plan: Annotated[
        DecodePlan,
        ConfigOptions(
            config=DecodePlan,
            only=("systems", "contexts", "batches", "steps", *SHARED),
            defaults={"systems": ("full", "triattention"), "contexts": (1024, 16384), "batches": (1, 8)},
            build=_decode_plan,
        ),
    ],
    json_file: Json = None,
) -> None:
    """Where a decode step's time goes: schedule, batch, model, attention, sample, compress."""
    with ready(plan.threads):
        from kvreclaim.bench import step

        rows = step.run(plan)
        publish(rows, [step.step_table(rows)], json_file)


@bench_app.command("beams")
@with_config
def beams(plan: Annotated[BeamsPlan, ConfigOptions(config=BeamsPlan)], json_file: Json = None) -> None:
    """Beam search beside transformers' own: equal outputs first, then seconds and blocks."""
    with ready(plan.threads):
        from kvreclaim.bench import beams

        rows = beams.run(plan)
        publish(rows, [beams.beams_table(rows)], json_file)


def _prefill_plan(**given: Any) -> PrefillPlan:
    """given: fields; methods as they came from the command line. Raises: InvalidArgumentError."""
    if "methods" in given:
        given["methods"] = names_in(",".join(given["methods"]))
    return PrefillPlan(**given)


@bench_app.command("prefill")
@with_config
def prefill(
    plan: Annotated[PrefillPlan, ConfigOptions(config=PrefillPlan, build=_prefill_plan)],
    json_file: Json = None,
) -> None:
    """Sparse prefill beside dense: what reads everything first, then tokens/s and the share that is read."""
    with ready(plan.threads):
        from kvreclaim.bench import prefill

        rows = prefill.run(plan)
        publish(rows, [prefill.prefill_table(rows)], json_file)


def _chunks_plan(**given: Any) -> ChunksPlan:
    """given: fields; ways as they came from the command line. Raises: InvalidArgumentError."""
    if "reuse" in given:
        given["reuse"] = names_in(",".join(given["reuse"]))
    return ChunksPlan(**given)


@bench_app.command("chunks")
@with_config
def chunks(
    plan: Annotated[ChunksPlan, ConfigOptions(config=ChunksPlan, build=_chunks_plan)], json_file: Json = None
) -> None:
    """Chunks that are reused out of place: what equals the whole prompt first, then time to first token."""
    with ready(plan.threads):
        from kvreclaim.bench import chunks

        rows = chunks.run(plan)
        publish(rows, [chunks.chunks_table(rows)], json_file)


@bench_app.command("packed")
@with_config
def packed(plan: Annotated[PackedPlan, ConfigOptions(config=PackedPlan)], json_file: Json = None) -> None:
    """Weights of 4, 6 and 8 bits beside bf16: products, decode, and what rounding the activations costs."""
    with ready(plan.threads):
        from kvreclaim.bench.packed import decode, products, quality

        parts: dict[str, list[dict[str, Any]]] = {}
        tables = []
        if plan.products:
            parts["products"], machine = products.run(plan)
            tables.append(products.products_table(parts["products"], machine))
        if plan.packed:
            parts["decode"] = decode.run(plan)
            tables.append(decode.decode_table(parts["decode"]))
            parts["quality"] = quality.run(plan)
            tables.append(quality.quality_table(parts["quality"]))
        rows = [{"part": part, **row} for part, found in parts.items() for row in found]
        publish(rows, tables, json_file)


@bench_app.command("tiers")
@with_config
def tiers(
    plan: Annotated[TiersPlan, ConfigOptions(config=TiersPlan)],
    json_file: Json = None,
) -> None:
    """Below the pool: hits by tier, first token from device, host and disk, swapping against recomputing."""
    with ready(plan.threads):
        from kvreclaim.bench.tiers import first_token, hits, swap

        parts: dict[str, list[dict[str, Any]]] = {}
        tables = []
        if plan.hits and plan.trace is None:
            typer.echo("hit rates are left out: --trace names no trace of block hashes.")
        elif plan.hits:
            parts["hits"] = hits.run(plan)
            tables.append(hits.hits_table(parts["hits"]))
        if plan.first_token:
            parts["first_token"] = first_token.run(plan)
            tables.append(first_token.first_token_table(parts["first_token"]))
        if plan.swap:
            parts["swap"] = swap.run(plan)
            tables.append(swap.swap_table(parts["swap"]))
        rows = [{"part": part, **row} for part, found in parts.items() for row in found]
        publish(rows, tables, json_file)


@bench_app.command("vllm")
@with_config
def vllm(plan: Annotated[VllmPlan, ConfigOptions(config=VllmPlan)], json_file: Json = None) -> None:
    """vLLM with and without the plugin: its pool, `vllm bench serve`, and what it costs for nothing."""
    with ready(plan.threads):
        from kvreclaim.bench import common, vllm_chart, vllm_cost, vllm_pool, vllm_serve

        console = common.wide_console(stderr=True)
        rows, versions = vllm_pool.run(plan, console)
        if rows:
            typer.echo(vllm_pool.pool_table(rows))
            typer.echo("\n" + "\n".join(vllm_pool.block_lines(rows)))
            if plan.plot is not None:
                vllm_chart.pool_chart(rows, plan.plot)
        # These take long: what is known so far outlives a run that is stopped.
        parts: dict[str, list[dict[str, Any]]] = {"cost": [], "serve": []}
        publish(rows, [], json_file, peer_versions=versions, **parts)
        if "serve" in plan.cases:
            parts["serve"] = vllm_serve.run(plan, console)
            typer.echo("\n" + vllm_serve.serve_table(parts["serve"]))
            publish(rows, [], json_file, peer_versions=versions, **parts)
        if "cost" in plan.cases:
            parts["cost"] = vllm_cost.run(plan, console)
            typer.echo("\n" + vllm_cost.cost_table(parts["cost"]))
            publish(rows, [], json_file, peer_versions=versions, **parts)


@bench_app.command("plot")
def plot(
    files: Annotated[list[Path], typer.Argument(help="Results of `bench decode`.")],
    out: Annotated[Path, typer.Option(help="The image to write.", callback=picture)] = Path(
        "docs/decode_speed.png"
    ),
) -> None:
    """Chart decode speed over the context from result files."""
    with usage_errors():
        from kvreclaim.bench.plot import decode_chart

        decode_chart(files, out)
