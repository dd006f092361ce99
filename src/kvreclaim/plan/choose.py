"""Lower bounds on the cards that serve a trace under targets.

No scheduler can do with fewer at these step times. A simulation finds how many replicas really serve the
trace, from the bound on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

import numpy as np

from kvreclaim.plan.cards import Card, all_cards, find_card
from kvreclaim.plan.cost import Linear, StepLoad
from kvreclaim.plan.demand import Cache
from kvreclaim.plan.lengths import Lengths, read_lengths
from kvreclaim.plan.on_card import GIB
from kvreclaim.plan.plan_request import PlanRequest
from kvreclaim.plan.pool import CardPool, Seats, make_pool
from kvreclaim.plan.recompute import blocks_while_decoding, prefill_seconds
from kvreclaim.plan.roofline import BASE_S, ERROR, roofline
from kvreclaim.plan.sections import PlanReport
from kvreclaim.plan.targets import Targets, parse_targets
from kvreclaim.plan.weights import WeightFormat, weight_format

MOST_CARDS = 8
"""Maximum number of cards per replica."""
MEASURES = ("ttft", "tpot")
Resource = Literal["memory", "bandwidth", "compute"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bound for one kind of card.

    replicas:  minimum; None: no number is enough, for the reason in `why`
    shares:    share of one replica's time and memory that the trace takes, by resource; replicas is the
               largest one, rounded up
    per_replica: cards of one replica, tensor parallel
    """

    card: Card
    per_replica: int
    replicas: int | None
    why: str
    binds: Resource | None
    shares: Mapping[Resource, float]
    num_blocks: int

    @property
    def price(self) -> float | None:
        """Dollars an hour of the minimum number of cards at their lowest price."""
        if self.replicas is None or self.card.price is None:
            return None
        return self.replicas * self.per_replica * self.card.price[0]


@dataclass(frozen=True, slots=True)
class Chooser:
    """Model, trace, targets and engine: everything except the card."""

    cache: Cache
    weights: WeightFormat
    lengths: Lengths
    slo: Targets
    utilization: float
    other_bytes: int | None
    max_num_seqs: int
    bandwidth_share: float
    flops_share: float
    speed: float = 1.0

    def bound(self, card: Card, memory_bytes: int | None = None) -> Bound:
        """Return the minimum number of replicas, each of the fewest cards that hold the weights and the
        longest request."""
        needed = self._most_blocks()
        num, pool = 1, self._pool(card, memory_bytes, 1)
        while pool.num_blocks < needed and num < MOST_CARDS:
            num *= 2
            pool = self._pool(card, memory_bytes, num)
        if pool.num_blocks < needed:
            why = (
                f"the weights leave {pool.num_blocks:,} blocks on each of {num} cards, and the longest "
                f"request takes {needed:,}"
            )
            return Bound(card, num, None, why, "memory", {}, pool.num_blocks)
        time = roofline(
            self.cache.shape,
            card,
            self.weights,
            self.cache.form,
            num_cards=num,
            bandwidth_share=self.bandwidth_share,
            flops_share=self.flops_share,
            block_size=self.cache.block_size,
            read_share=self.cache.shape.read_share(self._mean_length()),
        )
        if found := self._too_slow(time):
            why, binds = found
            return Bound(card, num, None, why, binds, {}, pool.num_blocks)
        shares = self._shares(time, pool)
        worst: Resource = max(shares, key=lambda name: shares[name])
        load = f"{shares[worst]:.2f} times" if shares[worst] > 1 else f"{shares[worst]:.0%} of"
        why = f"{worst} binds, {load} what one has"
        return Bound(card, num, ceil(shares[worst]), why, worst, shares, pool.num_blocks)

    def _pool(self, card: Card, memory_bytes: int | None, num_cards: int) -> CardPool:
        return make_pool(
            self.cache,
            memory_bytes or card.usable_bytes,
            self.weights,
            utilization=self.utilization,
            other_bytes=self.other_bytes,
            num_cards=num_cards,
            seats=Seats(self.max_num_seqs),
        )

    def _most_blocks(self) -> int:
        """Blocks of the largest request, in its prompt or at its end."""
        footprint, lengths = self.cache.footprint, self.lengths
        ends = lengths.prompts + lengths.outputs
        at = {int(ends.argmax()), int(lengths.prompts.argmax())}
        slots = max(footprint.slots_needed(int(lengths.prompts[n]), int(ends[n])) for n in at)
        return -(-slots // self.cache.block_size)

    def _mean_length(self) -> int:
        lengths = self.lengths
        return int(np.average(lengths.prompts + lengths.outputs / 2, weights=lengths.outputs))

    def _too_slow(self, time: Linear) -> tuple[str, Resource] | None:
        """Return the target that a request misses even alone on the replica, and what binds."""
        slo, reading = self.slo, time.step_s(StepLoad(1, 1, 0)) - BASE_S
        if slo.tpot_s is not None and reading > slo.tpot_s:
            return (
                f"reading the weights alone takes {reading * 1e3:.1f} ms a step, and "
                f"{slo.tpot_s * 1e3:g} are allowed",
                "bandwidth",
            )
        longest = int(np.percentile(self.lengths.prompts, 99, method="lower"))
        prefill = prefill_seconds(time, longest, self.cache.footprint.max_chunk)
        if slo.ttft_s is not None and prefill > slo.ttft_s:
            return (
                f"computing the p99 prompt of {longest:,} tokens takes {prefill:.2f} s, and {slo.ttft_s:g} "
                "are allowed",
                "compute",
            )
        return None

    def _shares(self, time: Linear, pool: CardPool) -> dict[Resource, float]:
        """Return the minimum share of one replica's time by resource.

        compute:   products of all tokens
        bandwidth: keys of every decoded token, and weights once per step of max_num_seqs sequences
        memory:    bandwidth with only as many sequences per step as the pool holds
        """
        lengths, footprint = self.lengths, self.cache.footprint
        prompts, outputs = lengths.prompts.astype(float), lengths.outputs.astype(float)
        seconds = lengths.duration_s / self.speed
        flop = getattr(time, "flop", time.beyond)
        products = flop * (prompts + outputs).sum() + time.pair * (prompts**2 / 2).sum()
        weights = blocks_while_decoding(lengths, footprint)
        mean_blocks = float((weights @ np.arange(len(weights))) / weights.sum())
        live = mean_blocks * self.cache.block_size
        keys, fit = time.kv * live, max(1.0, pool.num_blocks / mean_blocks)
        if pool.states is not None:
            keys, fit = keys + time.seq, min(fit, pool.num_seqs)
        reading, crowded = (outputs.sum() * (keys + time.base / n) for n in (self.max_num_seqs, fit))
        return {
            "compute": float(products / seconds),
            "bandwidth": float(reading / seconds),
            "memory": float(crowded / seconds),
        }


def on_cards(answer: PlanReport, cache: Cache, request: PlanRequest) -> None:
    """Report lower bounds of every card, the cheapest first, and reasons against the others."""
    assert request.trace is not None
    assert request.slo is not None
    chooser = Chooser(
        cache,
        weight_format(request.weights, cache.shape),
        read_lengths(Path(request.trace), request.first),
        parse_targets(request.slo, MEASURES),
        utilization=request.utilization,
        other_bytes=None if request.other_gib is None else round(request.other_gib * GIB),
        max_num_seqs=request.max_num_seqs,
        bandwidth_share=request.bandwidth_share,
        flops_share=request.flops_share,
    )
    bounds = sorted(map(chooser.bound, _chosen_cards(request)), key=_order)
    section = answer.section(f"cards for {Path(request.trace).name} at p99 {request.slo}, at least")
    for bound in bounds:
        section.row(bound.card.name, _text(bound))
    section.row("note", f"lower bounds by data sheets ({ERROR}); bursts and queues need more")
    for bound in bounds:
        if bound.shares:
            shares = ", ".join(f"{name} {share:.3f}" for name, share in bound.shares.items())
            section.step(f"{bound.card.name}: of one replica with {bound.num_blocks:,} blocks: {shares}")
    answer.set(cards=[_values(bound) for bound in bounds])


def _chosen_cards(request: PlanRequest) -> list[Card]:
    assert request.cards is not None
    named = request.cards.strip().lower() != "all"
    found = [find_card(name) for name in request.cards.split(",")] if named else list(all_cards())
    return found


def _order(bound: Bound) -> tuple[bool, bool, float]:
    return bound.replicas is None, bound.price is None, bound.price or 0.0


def _text(bound: Bound) -> str:
    if bound.replicas is None:
        return f"none: {bound.why}"
    cards = bound.replicas * bound.per_replica
    many = f"{cards}" if bound.per_replica == 1 else f"{bound.replicas} x {bound.per_replica}"
    price = "price not known" if bound.price is None else f"${bound.price:.2f} an hour"
    return f"{many}, {price}; {bound.why}"


def _values(bound: Bound) -> dict[str, object]:
    return {
        "card": bound.card.name,
        "cards_per_replica": bound.per_replica,
        "least_replicas": bound.replicas,
        "price_per_hour": bound.price,
        "price_date": bound.card.date,
        "binds": bound.binds,
        "why": bound.why,
        "shares": dict(bound.shares),
        "pool_blocks": bound.num_blocks,
    }
