"""How many sequences a card may run if recomputing a preempted one has a time limit."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    AtOnce,
    blocks_while_decoding,
    longest_blocks,
    longest_recompute,
    per_token,
    sequences_at_once,
)
from kvreclaim.plan.roofline import DATA_SHEET
from kvreclaim.plan.sections import PlanReport


@dataclass(frozen=True, slots=True)
class Preemption:
    """What a bound on recompute and the lengths of a trace give.

    longest:   tokens that are recomputed within the bound
    p99:       tokens of the p99 request
    at_once:   sequences at once; alongside: next to the longest prompt
    prompt:    blocks of the longest prompt while it is computed
    bounded:   sequences of `longest` tokens that fit at once
    """

    longest: int
    p99: int
    at_once: AtOnce
    alongside: int
    prompt: int
    bounded: int


def preempted(
    answer: PlanReport, cache: Cache, request: PlanRequest, time: Linear | None, pool: CardPool
) -> None:
    """Report max_num_seqs by a bound on recompute and the lengths of a trace."""
    if time is None:
        raise InvalidArgumentError(
            "how long recompute takes depends on the card; name one with --gpu, or pass --calibration.",
            field="gpu",
        )
    found = _preemption(cache, request, time, pool)
    _describe(answer, cache, request, time, pool, found)
    at_once = found.at_once
    answer.set(
        recompute_p99_ms=request.recompute_p99_ms,
        recompute_max_tokens=found.longest,
        recompute_sequences=found.bounded,
        p99_request_tokens=found.p99,
        max_num_seqs=at_once.p99,
        max_num_seqs_beside_prompt=found.alongside,
        max_num_seqs_normal=at_once.normal,
        max_num_seqs_worst=at_once.worst,
        max_num_seqs_mean=at_once.mean,
        mean_blocks=at_once.mean_blocks,
        sd_blocks=at_once.sd_blocks,
    )


def _preemption(cache: Cache, request: PlanRequest, time: Linear, pool: CardPool) -> Preemption:
    assert request.trace is not None
    assert request.recompute_p99_ms is not None
    lengths = read_lengths(Path(request.trace), request.first)
    longest = longest_recompute(time, request.recompute_p99_ms / 1e3, cache.footprint.max_chunk)
    weights = blocks_while_decoding(lengths, cache.footprint)
    most = longest_blocks(lengths, cache.footprint)
    at_once = sequences_at_once(weights, pool.num_blocks, most)
    if pool.states is not None and at_once.p99 > pool.num_seqs:
        at_once = replace(at_once, p99=pool.num_seqs)
    prompt = cache.prompt_blocks(int(lengths.prompts.max()))
    return Preemption(
        longest,
        int(np.percentile(lengths.prompts + lengths.outputs, 99, method="higher")),
        at_once,
        sequences_at_once(weights, max(0, pool.num_blocks - prompt), most).p99,
        prompt,
        pool.num_blocks // max(1, blocks_for(longest, cache.block_size)),
    )


def _describe(
    answer: PlanReport,
    cache: Cache,
    request: PlanRequest,
    time: Linear,
    pool: CardPool,
    found: Preemption,
) -> None:
    longest, at_once, limit = found.longest, found.at_once, f"{request.recompute_p99_ms:g} ms"
    section = answer.section(f"recompute within {limit}, lengths of {Path(str(request.trace)).name}")
    section.row(
        "recomputed in that time", f"{longest:,} tokens; 99 % of the requests end below {found.p99:,}"
    )
    section.row("max_num_seqs", f"{at_once.p99:,}: with so many the pool is too small 1 time in 100")
    verdict = "kept by 99 % of those preempted" if found.p99 <= longest else "broken by long requests"
    if pool.states is not None:
        section.row("states", f"of {words.count(pool.num_seqs, 'sequence')}, more do not run")
    section.row("the bound", f"{verdict}; {found.bounded:,} sequences as long as it allows fit at once")
    section.row("by the longest, the mean", f"{at_once.worst:,}, {at_once.mean:,}")
    if time.facts.get("kind") == DATA_SHEET:
        section.step(
            f"{1e6 * per_token(time):.3f} us x n + {1e6 * time.pair / 2:.6f} us x n^2 = {limit} at n = "
            f"{longest:,}"
        )
    section.step("a preempted sequence is computed again whole, whatever its budget")
    section.step(
        f"{pool.num_blocks:,} / {blocks_for(longest, cache.block_size):,} blocks of these = {found.bounded:,}"
    )
    section.step(
        f"at a random moment of decoding a request holds {at_once.mean_blocks:.1f} blocks, standard "
        f"deviation {at_once.sd_blocks:.1f}"
    )
    section.step(
        f"P(sum of N > {pool.num_blocks:,}) <= 1 % up to N = {at_once.p99:,}, by exact convolution; as a "
        f"normal distribution {at_once.normal:,}"
    )
    section.step(
        f"beside the {found.prompt:,} blocks of the longest prompt in the making: {found.alongside:,}"
    )
    section.step("a bound at a moment, not over a request's life: `kvreclaim simulate` starts here")
