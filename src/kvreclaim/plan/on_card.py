"""A model on a card: the part of a plan for --gpu and --memory-bytes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.plan import words
from kvreclaim.plan.cards import Card, find_card
from kvreclaim.plan.cost import Linear, StepLoad
from kvreclaim.plan.demand import Cache
from kvreclaim.plan.lengths import read_lengths
from kvreclaim.plan.plan_request import PlanRequest
from kvreclaim.plan.pool import (
    CardPool,
    Fit,
    Seats,
    activation_bytes,
    binds,
    card_memory,
    fit,
    make_pool,
    roomy_pool,
)
from kvreclaim.plan.recompute import (
    blocks_while_decoding,
    longest_blocks,
    longest_recompute,
    per_token,
    sequences_at_once,
)
from kvreclaim.plan.roofline import DATA_SHEET, roofline
from kvreclaim.plan.sections import PlanReport, Section
from kvreclaim.plan.weights import WeightBytes, WeightFormat, weight_bytes, weight_format


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


GIB = 1 << 30


def on_card(answer: PlanReport, cache: Cache, request: PlanRequest) -> None:
    """Blocks, the longest context, sequences at once, what binds; then what a trace's lengths say."""
    card = None if request.gpu is None else find_card(request.gpu).priced(request.price)
    require(
        request.calibration is None or os.path.isfile(request.calibration),
        f"--calibration {request.calibration!r} is no file; make one with `kvreclaim calibrate-speed`.",
        "calibration",
    )
    weights = weight_format(request.weights, cache.shape)
    memory = card_memory(card, request.memory_bytes)
    what = f"{memory / GIB:.3f} GiB" if card is None else card.name
    pool = roomy_pool(
        what,
        cache.shape,
        request.tensor_parallel_size,
        lambda size: pool_of(cache, replace(request, tensor_parallel_size=size), memory, weights),
        cache.prompt_blocks(request.context or request.prefix + request.own or 1),
    )
    section = answer.section(_title(cache, request, what, weights))
    _memory(section, cache, request, card, pool, weights)
    each = _length(cache, request)
    found = fit(cache, pool, each, prefix=request.prefix)
    _sequences(section, cache, request, pool, found)
    balanced = _balanced(cache, request, pool, found)
    if balanced is not None:
        section.row("more fit", f"{balanced:,} with --max-num-seqs {balanced}, which takes fewer states")
    time = step_time(cache, request, card, weights)
    bound = "memory" if time is None else binds(time, found, cache.held(each))
    section.row("what binds", f"{bound}{_because(time, found, cache.held(each), cache.shape.has_states)}")
    if card is not None and card.price is not None:
        low, high = (price * request.tensor_parallel_size for price in card.price)
        when = "given" if request.price is not None else f"table of {card.date}"
        section.row("price", f"${low:.2f}" + (f" to {high:.2f}" if high > low else "") + f" an hour, {when}")
    answer.set(
        gpu=None if card is None else card.name,
        memory_bytes=memory,
        utilization=request.utilization,
        card_weight_bytes=pool.weight_bytes,
        other_bytes=pool.other_bytes,
        other_is_estimated=request.other_gib is None,
        pool_kv_bytes=pool.kv_bytes,
        pool_blocks=pool.num_blocks,
        state_slots=pool.states.num_slots if pool.states else None,
        state_checkpoints=pool.states.num_checkpoints if pool.states else None,
        balanced_sequences=balanced,
        state_sequences=pool.num_seqs if pool.states else None,
        pool_state_bytes=pool.states_bytes if pool.states else None,
        max_tokens=found.max_tokens,
        max_sequences=found.max_sequences,
        sequence_tokens=found.each,
        sequence_blocks=found.each_blocks,
        prompt_blocks=found.prompt_blocks,
        binds=bound,
        price_per_hour=None if card is None or card.price is None else card.price[0],
    )
    if request.recompute_p99_ms is not None:
        from kvreclaim.plan.on_card import preempted

        preempted(answer, cache, request, time, pool)


def _balanced(cache: Cache, request: PlanRequest, pool: CardPool, found: Fit) -> int | None:
    """The most sequences that have room for their blocks and their states alike; None where that is what the
    pool has."""
    if pool.states is None or found.max_sequences >= pool.num_seqs:
        return None

    def fits(num_seqs: int) -> bool:
        smaller = replace(pool, num_seqs=num_seqs, states=_seats(request).slots(num_seqs))
        return fit(cache, smaller, found.each, prefix=request.prefix).max_sequences >= num_seqs

    return next(filter(fits, range(pool.num_seqs, 0, -1)), None)


def _seats(request: PlanRequest) -> Seats:
    drafts = request.state_drafts
    return Seats(request.max_num_seqs, each=2 + drafts, checkpoints=request.state_checkpoints, drafts=drafts)


def pool_of(cache: Cache, request: PlanRequest, memory_bytes: int, weights: WeightFormat) -> CardPool:
    other = None if request.other_gib is None else round(request.other_gib * GIB)
    return make_pool(
        cache,
        memory_bytes,
        weights,
        utilization=request.utilization,
        other_bytes=other,
        num_cards=request.tensor_parallel_size,
        seats=_seats(request),
    )


def step_time(cache: Cache, request: PlanRequest, card: Card | None, weights: WeightFormat) -> Linear | None:
    """Calibrated, or by the data sheet; None where there is neither."""
    if request.calibration is not None:
        return Linear.load(Path(request.calibration))
    if card is None:
        return None
    return roofline(
        cache.shape,
        card,
        weights,
        cache.form,
        num_cards=request.tensor_parallel_size,
        bandwidth_share=request.bandwidth_share,
        flops_share=request.flops_share,
        block_size=cache.block_size,
        read_share=cache.shape.read_share(_length(cache, request)),
    )


def _title(cache: Cache, request: PlanRequest, what: str, weights: WeightFormat) -> str:
    many = "" if request.tensor_parallel_size == 1 else f"{request.tensor_parallel_size} x "
    cut = "" if request.compression is None else f", {request.compression}"
    return f"{many}{what}, weights in {weights.name}, cache in {cache.form.name}{cut}"


def _length(cache: Cache, request: PlanRequest) -> int:
    """Length of the sequences that are counted: the request's, else the longest that the model has
    positions for."""
    return request.context or request.prefix + request.own or cache.shape.max_position


def _memory(
    section: Section,
    cache: Cache,
    request: PlanRequest,
    card: Card | None,
    pool: CardPool,
    weights: WeightFormat,
) -> None:
    sizes = weight_bytes(cache.shape, weights)
    estimated = " (estimated)" if request.other_gib is None else ""
    section.row("memory", f"{words.size(pool.memory_bytes)}, of which {pool.utilization:g} are used")
    section.row("weights", words.size(pool.weight_bytes))
    section.row("other", f"{words.size(pool.other_bytes)}{estimated}")
    if pool.states is not None:
        running = words.count(pool.num_seqs, "sequence")
        kept = words.count(pool.states.num_checkpoints, "checkpoint")
        section.row(
            "states",
            f"{words.size(pool.states_bytes)}: {pool.states.num_slots:,} slots for {running} and {kept}",
        )
    section.row("blocks", f"{pool.num_blocks:,}, {words.size(pool.num_blocks * pool.block_bytes)}")
    if card is not None and request.memory_bytes is None:
        source = f"reported by {card.reported_by}" if card.reported_bytes else "the data sheet's"
        section.step(f"memory of {card.name}: {card.usable_bytes:,} bytes, {source}; table of {card.date}")
    divided = "" if request.tensor_parallel_size == 1 else f", / {request.tensor_parallel_size}"
    section.step(f"weights: {_counted(sizes, weights)} = {sizes.total:,} bytes{divided}")
    if request.other_gib is None:
        section.step(
            f"other: activations of {request.max_num_batched_tokens:,} tokens, {activation_bytes(cache):,} "
            "bytes, and 0.95 GiB for runtime and graphs; give --other-gib where it is known"
        )
    states = ""
    if pool.states is not None:
        states = f"- {pool.states_bytes:,} "
        section.step(
            f"states: {pool.states.each} x {pool.num_seqs:,} + {pool.states.num_checkpoints:,} slots x "
            f"{pool.state_bytes:,} = {pool.states_bytes:,} bytes, at most half of {pool.cache_bytes:,}"
        )
    section.step(
        f"{pool.memory_bytes:,} x {pool.utilization:g} - {pool.weight_bytes:,} - {pool.other_bytes:,} "
        f"{states}= {pool.kv_bytes:,} bytes"
    )
    section.step(f"/ {pool.block_bytes:,} bytes a block = {pool.num_blocks:,} blocks")


def _counted(sizes: WeightBytes, weights: WeightFormat) -> str:
    if weights.scope == "file":
        return f"the file's tensors, {weights.why}"
    why = f" ({weights.why})" if weights.why else ""
    return (
        f"{words.billions(sizes.linear_params)} linear x {weights.bits:g} bits{why}, "
        f"{words.billions(sizes.plain_params)} others (embedding, head, norms)"
    )


def _sequences(section: Section, cache: Cache, request: PlanRequest, pool: CardPool, found: Fit) -> None:
    limit = cache.shape.max_position
    if found.max_tokens is None:
        section.row("longest sequence", f"as long as it likes; the model has {limit:,} positions")
    else:
        section.row("longest sequence", f"{found.max_tokens:,} tokens; the model has {limit:,} positions")
        section.step(
            f"{pool.num_blocks:,} blocks x {pool.block_size} = {pool.num_slots:,} tokens of one sequence"
        )
    section.row("sequences at once", f"{found.max_sequences:,} of {found.each:,} tokens")
    capped = "" if pool.states is None else f", at most {pool.num_seqs:,} with states"
    section.step(
        f"{pool.num_blocks:,} blocks / {found.each_blocks:,} of each sequence of {found.each:,} tokens = "
        f"{found.max_sequences:,} sequences{capped}"
    )
    if cache.footprint.eviction_method.evicts:
        fits = "" if found.prompt_fits else ", more than there are: such a prompt never runs"
        section.row("in a prompt", f"{words.count(found.prompt_blocks, 'block')}{fits}")
    elif not found.prompt_fits:
        section.row("does not fit", f"{found.each:,} tokens take {found.prompt_blocks:,} blocks")


def _because(time: Linear | None, found: Fit, held: int, has_states: bool) -> str:
    num = found.max_sequences
    if num == 0:
        return ": not one such sequence fits"
    if time is None:
        return "; name a --gpu to compare with its bandwidth and FLOP/s"
    step, keys = time.step_s(StepLoad(num, num, num * held)), time.kv * num * held
    states = f", {1e3 * time.seq * num:.1f} states" if has_states else ""
    return (
        f": a step of {num:,} takes {1e3 * step:.1f} ms, of which {1e3 * keys:.1f} read keys and values"
        f"{states} ({_source(time)})"
    )


def _source(time: Linear) -> str:
    return str(time.facts.get("error") or time.facts.get("kind") or "calibrated")
