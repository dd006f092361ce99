"""One pool, many long requests: concurrency, preemptions and time.

Each system serves the same requests (random prompts, fixed output length, end tokens ignored) from a pool of
the same bytes with its own admission. `fits_at_once` is how many of them the pool holds to their ends without
a preemption: blocks in the pool over the most blocks of one request. `mean_running` is the mean over steps
while requests were waiting, when the pool is the limit (over all steps if none ever waited): without
compression it counts requests that are admitted while short and preempted later.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from kvreclaim.bench.common import Row, sheet
from kvreclaim.bench.plans import MemoryPlan
from kvreclaim.bench.systems.base import BLOCK_SIZE as OUR_BLOCK_SIZE
from kvreclaim.bench.systems.base import CHUNK, random_prompts
from kvreclaim.bench.systems.vllm_peer import BLOCK_SIZE as VLLM_BLOCK_SIZE
from kvreclaim.bench.systems.vllm_peer import VllmProcess
from kvreclaim.engine.api.llm import LLM
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.sampling_params import SamplingParams


def pool_tokens(plan: MemoryPlan) -> int:
    """Slots of the pool, in whole blocks of either block size."""
    tokens = plan.pool_requests * plan.length
    return blocks_for(tokens, VLLM_BLOCK_SIZE) * VLLM_BLOCK_SIZE


def run(plan: MemoryPlan, console: Console) -> list[Row]:
    """Serve the requests under each policy, and by vLLM if its interpreter is given."""
    rows = []
    for policy in plan.policies:
        rows.append(_ours(plan, policy))
        _print_row(console, rows[-1])
    if plan.vllm_python is not None:
        rows.append(_vllm(plan, plan.vllm_python))
        _print_row(console, rows[-1])
    fits = {row["system"]: row["fits_at_once"] for row in rows}
    whole = fits.get("kvreclaim-full")
    return [row | {"ratio_to_full": row["fits_at_once"] / whole if whole else None} for row in rows]


def _print_row(console: Console, row: Row) -> None:
    console.print(
        f"{row['system']}: {row['elapsed_s']:.1f} s, {row['fits_at_once']} fit at once", style="dim"
    )


def _ours(plan: MemoryPlan, policy: str) -> Row:
    config = plan.policy(policy)
    llm = LLM(
        plan.model,
        dtype=plan.dtype,
        block_size=OUR_BLOCK_SIZE,
        num_blocks=pool_tokens(plan) // OUR_BLOCK_SIZE,
        max_num_seqs=plan.requests,
        max_num_batched_tokens=CHUNK,
        max_model_len=plan.length + 1,
        kernels=plan.kernels,
    )
    engine, compressor = llm.engine, None if config is None else llm.compressor(config)
    params = SamplingParams(temperature=0.0, max_tokens=plan.output, ignore_eos=True)
    prompts = random_prompts(plan.requests, plan.prompt, llm.loaded.vocab_size, seed=11)
    requests = [engine.add_request(f"m{i}", p, params, compressor) for i, p in enumerate(prompts)]
    steps: list[Any] = []
    started = perf_counter()
    while engine.has_unfinished:
        steps.append(engine.step().stats)
    elapsed_s = perf_counter() - started
    outputs = [request.output() for request in requests]
    if wrong := [out.error for out in outputs if out.error is not None]:
        raise RuntimeError(f"{policy}: a request failed: {wrong[0]}")
    held = max(out.metrics.peak_blocks for out in outputs)
    return _row(
        plan,
        f"kvreclaim-{policy}",
        OUR_BLOCK_SIZE,
        elapsed_s=elapsed_s,
        running=[step.num_running for step in steps],
        waiting=[step.num_waiting for step in steps],
        preemptions=engine.totals.num_preemptions,
        peak_blocks=engine.memory.pool.peak_in_use,
        blocks_held=held,
        kernels=engine.kernels,
        budget=None if config is None else config.budget,
    )


def _vllm(plan: MemoryPlan, python: Path) -> Row:
    with closing(VllmProcess(python, plan.threads, 2 * 2**30)) as process:
        process.load(
            plan.setup,
            max_model_len=plan.length + 1,
            max_num_seqs=plan.requests,
            num_gpu_blocks_override=pool_tokens(plan) // VLLM_BLOCK_SIZE + 1,  # one of them is its null block
            block_size=VLLM_BLOCK_SIZE,
        )
        done = process.serve(plan.requests, plan.prompt, plan.output)
    return _row(
        plan,
        "vllm",
        VLLM_BLOCK_SIZE,
        elapsed_s=done["elapsed_s"],
        running=done["running"],
        waiting=done["waiting"],
        preemptions=done["preemptions"],
        peak_blocks=max(done["blocks"]),
        blocks_held=blocks_for(plan.length, VLLM_BLOCK_SIZE),
    )


def _row(
    plan: MemoryPlan,
    system: str,
    block_size: int,
    *,
    running: Sequence[int],
    waiting: Sequence[int],
    elapsed_s: float,
    blocks_held: int,
    **more: Any,
) -> Row:
    limited = [now for now, queue in zip(running, waiting, strict=True) if queue] or list(running)
    num_blocks = pool_tokens(plan) // block_size
    return {
        "system": system,
        **plan.facts(),
        "requests": plan.requests,
        "prompt": plan.prompt,
        "output": plan.output,
        "pool_tokens": pool_tokens(plan),
        "block_size": block_size,
        "num_blocks": num_blocks,
        "blocks_per_request": blocks_held,
        "fits_at_once": num_blocks // blocks_held,
        "max_running": max(running),
        "mean_running": fmean(limited),
        "elapsed_s": elapsed_s,
        "tokens_per_s": plan.requests * plan.output / elapsed_s,
        "steps": len(running),
        **more,
    }


def memory_table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = (
        f"{first['requests']} requests of {first['prompt']:,} + {first['output']:,} tokens, "
        f"pool of {first['pool_tokens']:,} tokens"
    )
    columns = {
        "system": "{system}",
        "fit at once": "{fits_at_once}",
        "of full": "{ratio_to_full:.1f}x",
        "most": "{max_running}",
        "mean running": "{mean_running:.1f}",
        "preempted": "{preemptions}",
        "peak blocks": "{peak_blocks:,} of {num_blocks:,}",
        "seconds": "{elapsed_s:,.1f}",
        "tokens/s": "{tokens_per_s:,.0f}",
    }
    return sheet(title, columns, rows)
