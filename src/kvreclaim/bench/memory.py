"""One pool, many long requests: concurrency, preemptions and time under each policy.

`fits_at_once` is how many of the requests the pool holds to their ends without a preemption: blocks in the
pool over the most blocks of one request. `mean_running` is the mean over steps while requests were waiting,
when the pool is the limit (over all steps if none ever waited): without compression it counts requests that
are admitted while short and preempted later.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from time import perf_counter

from rich.console import Console
from rich.table import Table

from kvreclaim.bench.common import Row, sheet
from kvreclaim.bench.plans import MemoryPlan
from kvreclaim.bench.systems.base import BLOCK_SIZE, CHUNK, random_prompts
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import StepStats
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.sampling_params import SamplingParams

ROUNDING = 128
"""The pool is a multiple of this many tokens, vLLM's block on a CPU."""


def run(plan: MemoryPlan, console: Console) -> list[Row]:
    """Serve the requests (random prompts, fixed output length, end tokens ignored) under each policy."""
    rows = []
    for policy in plan.policies:
        row = _serve(plan, policy)
        fits = row["fits_at_once"]
        console.print(f"{row['system']}: {row['elapsed_s']:.1f} s, {fits} fit at once", style="dim")
        rows.append(row)
    whole = {row["system"]: row["fits_at_once"] for row in rows}.get("kvreclaim-full")
    return [row | {"ratio_to_full": row["fits_at_once"] / whole if whole else None} for row in rows]


def _serve(plan: MemoryPlan, policy: str) -> Row:
    config = plan.policy(policy)
    pool_tokens = blocks_for(plan.pool_requests * plan.length, ROUNDING) * ROUNDING
    num_blocks = pool_tokens // BLOCK_SIZE
    llm = LLM(
        plan.model,
        dtype=plan.dtype,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=plan.requests,
        max_num_batched_tokens=CHUNK,
        max_model_len=plan.length + 1,
        kernels=plan.kernels,
    )
    engine, compressor = llm.engine, None if config is None else llm.compressor(config)
    params = SamplingParams(temperature=0.0, max_tokens=plan.output, ignore_eos=True)
    prompts = random_prompts(plan.requests, plan.prompt, llm.loaded.vocab_size, seed=11)
    requests = [engine.add_request(f"m{i}", p, params, compressor) for i, p in enumerate(prompts)]
    steps: list[StepStats] = []
    started = perf_counter()
    while engine.has_unfinished:
        steps.append(engine.step().stats)
    elapsed_s = perf_counter() - started
    outputs = [request.output() for request in requests]
    if wrong := [out.error for out in outputs if out.error is not None]:
        raise RuntimeError(f"{policy}: a request failed: {wrong[0]}")
    held = max(out.metrics.peak_blocks for out in outputs)
    running = [step.num_running for step in steps]
    return {
        "system": f"kvreclaim-{policy}",
        **plan.facts(),
        "requests": plan.requests,
        "prompt": plan.prompt,
        "output": plan.output,
        "pool_tokens": pool_tokens,
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
        "blocks_per_request": held,
        "fits_at_once": num_blocks // held,
        "max_running": max(running),
        "mean_running": fmean([step.num_running for step in steps if step.num_waiting] or running),
        "elapsed_s": elapsed_s,
        "tokens_per_s": plan.requests * plan.output / elapsed_s,
        "steps": len(running),
        "preemptions": engine.totals.num_preemptions,
        "peak_blocks": engine.memory.pool.peak_in_use,
        "kernels": engine.kernels,
        "budget": None if config is None else config.budget,
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
