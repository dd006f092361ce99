"""How many sequences a card may run if recomputing a preempted one has a time limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.plan import words
from kvreclaim.plan.cost import Linear
from kvreclaim.plan.demand import Cache
from kvreclaim.plan.lengths import read_lengths
from kvreclaim.plan.plan_request import PlanRequest
from kvreclaim.plan.pool import CardPool
from kvreclaim.plan.recompute import (
    blocks_while_decoding,
    longest_blocks,
    longest_recompute,
    per_token,
    sequences_at_once,
)
from kvreclaim.plan.roofline import DATA_SHEET
from kvreclaim.plan.sections import PlanReport


def preempted(
    answer: PlanReport, cache: Cache, request: PlanRequest, time: Linear | None, pool: CardPool
) -> None:
    """Report max_num_seqs by a bound on recompute and the lengths of a trace."""
    if time is None:
        raise InvalidArgumentError(
            "how long recompute takes depends on the card; name one with --gpu, or pass --calibration.",
            field="gpu",
        )
    assert request.trace is not None
    assert request.recompute_p99_ms is not None
    limit, num_blocks = f"{request.recompute_p99_ms:g} ms", pool.num_blocks
    lengths = read_lengths(Path(request.trace), request.first)
    longest = longest_recompute(time, request.recompute_p99_ms / 1e3, cache.footprint.max_chunk)
    p99 = int(np.percentile(lengths.prompts + lengths.outputs, 99, method="higher"))
    weights = blocks_while_decoding(lengths, cache.footprint)
    most = longest_blocks(lengths, cache.footprint)
    found = sequences_at_once(weights, num_blocks, most)
    if pool.states is not None and found.p99 > pool.num_seqs:
        found = replace(found, p99=pool.num_seqs)
    prompt = cache.prompt_blocks(int(lengths.prompts.max()))
    beside = sequences_at_once(weights, max(0, num_blocks - prompt), most).p99
    bounded = num_blocks // max(1, blocks_for(longest, cache.block_size))
    section = answer.section(f"recompute within {limit}, lengths of {Path(request.trace).name}")
    section.row("recomputed in that time", f"{longest:,} tokens; 99 % of the requests end below {p99:,}")
    section.row("max_num_seqs", f"{found.p99:,}: with so many the pool is too small 1 time in 100")
    verdict = "kept by 99 % of those preempted" if p99 <= longest else "broken by long requests"
    if pool.states is not None:
        section.row("states", f"of {words.count(pool.num_seqs, 'sequence')}, more do not run")
    section.row("the bound", f"{verdict}; {bounded:,} sequences as long as it allows fit at once")
    section.row("by the longest, the mean", f"{found.worst:,}, {found.mean:,}")
    if time.facts.get("kind") == DATA_SHEET:
        token, square = 1e6 * per_token(time), 1e6 * time.pair / 2
        section.step(f"{token:.3f} us x n + {square:.6f} us x n^2 = {limit} at n = {longest:,}")
    section.step("a preempted sequence is computed again whole, whatever its budget")
    section.step(f"{num_blocks:,} / {blocks_for(longest, cache.block_size):,} blocks of these = {bounded:,}")
    for text in found.steps(num_blocks):
        section.step(text)
    section.step(f"beside the {prompt:,} blocks of the longest prompt in the making: {beside:,}")
    section.step("a bound at a moment, not over a request's life: `kvreclaim simulate` starts here")
    answer.set(
        recompute_p99_ms=request.recompute_p99_ms,
        recompute_max_tokens=longest,
        recompute_sequences=bounded,
        p99_request_tokens=p99,
        max_num_seqs_beside_prompt=beside,
        **found.values(),
    )
