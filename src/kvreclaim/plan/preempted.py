"""How many sequences a card may run, if recomputing preempted ones is to stay below a time."""

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
    answer: PlanReport, cache: Cache, asked: PlanRequest, time: Linear | None, pool: CardPool
) -> None:
    """max_num_seqs from a bound on recompute, and from the lengths of a trace."""
    if time is None:
        raise InvalidArgumentError(
            "how long recompute takes depends on the card; name one with --gpu, or pass --calibration.",
            field="gpu",
        )
    assert asked.trace is not None
    assert asked.recompute_p99_ms is not None
    lengths = read_lengths(Path(asked.trace), asked.first)
    longest = longest_recompute(time, asked.recompute_p99_ms / 1e3, cache.footprint.max_chunk)
    p99 = int(np.percentile(lengths.prompts + lengths.outputs, 99, method="higher"))
    weights = blocks_while_decoding(lengths, cache.footprint)
    most = longest_blocks(lengths, cache.footprint)
    found = sequences_at_once(weights, pool.num_blocks, most)
    if pool.states is not None and found.p99 > pool.num_seqs:
        found = replace(found, p99=pool.num_seqs)
    prompt = cache.prompt_blocks(int(lengths.prompts.max()))
    beside = sequences_at_once(weights, max(0, pool.num_blocks - prompt), most).p99
    bounded = pool.num_blocks // max(1, blocks_for(longest, cache.block_size))
    name = Path(asked.trace).name
    section = answer.section(f"recompute within {asked.recompute_p99_ms:g} ms, lengths of {name}")
    section.row("recomputed in that time", f"{longest:,} tokens; 99 % of the requests end below {p99:,}")
    section.row("max_num_seqs", f"{found.p99:,}: with so many the pool is too small 1 time in 100")
    verdict = "kept by 99 % of those preempted" if p99 <= longest else "broken by long requests"
    if pool.states is not None:
        section.row("states", f"of {words.count(pool.num_seqs, 'sequence')}, more do not run")
    section.row("the bound", f"{verdict}; {bounded:,} sequences as long as it allows fit at once")
    section.row("by the longest, the mean", f"{found.worst:,}, {found.mean:,}")
    if time.facts.get("kind") == DATA_SHEET:
        section.step(
            f"{1e6 * per_token(time):.3f} us x n + {1e6 * time.pair / 2:.6f} us x n^2 = "
            f"{asked.recompute_p99_ms:g} ms at n = {longest:,}"
        )
    section.step("a preempted sequence is computed again whole, whatever its budget")
    section.step(
        f"{pool.num_blocks:,} / {blocks_for(longest, cache.block_size):,} blocks of these = {bounded:,}"
    )
    section.step(
        f"at a random moment of decoding a request holds {found.mean_blocks:.1f} blocks, standard deviation "
        f"{found.sd_blocks:.1f}"
    )
    section.step(
        f"P(sum of N > {pool.num_blocks:,}) <= 1 % up to N = {found.p99:,}, by exact convolution; as a "
        f"normal distribution {found.normal:,}"
    )
    section.step(f"beside the {prompt:,} blocks of the longest prompt in the making: {beside:,}")
    section.step("a bound at a moment, not over a request's life: `kvreclaim simulate` starts here")
    answer.set(
        recompute_p99_ms=asked.recompute_p99_ms,
        recompute_max_tokens=longest,
        recompute_sequences=bounded,
        p99_request_tokens=p99,
        max_num_seqs=found.p99,
        max_num_seqs_beside_prompt=beside,
        max_num_seqs_normal=found.normal,
        max_num_seqs_worst=found.worst,
        max_num_seqs_mean=found.mean,
        mean_blocks=found.mean_blocks,
        sd_blocks=found.sd_blocks,
    )
