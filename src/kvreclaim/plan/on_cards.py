"""Which cards serve a trace under targets: the part of a plan behind --cards."""

from __future__ import annotations

from pathlib import Path

from kvreclaim.plan.cards import Card, all_cards, find_card
from kvreclaim.plan.choose import Bound, Chooser, parse_slo
from kvreclaim.plan.demand import Cache
from kvreclaim.plan.lengths import read_lengths
from kvreclaim.plan.on_card import GIB
from kvreclaim.plan.plan_request import PlanRequest
from kvreclaim.plan.roofline import ERROR
from kvreclaim.plan.sections import PlanReport
from kvreclaim.plan.weights import weight_format


def on_cards(answer: PlanReport, cache: Cache, asked: PlanRequest) -> None:
    """Lower bounds of every card, the cheapest first; those that will not do, with the reason."""
    assert asked.trace is not None
    assert asked.slo is not None
    chooser = Chooser(
        cache,
        weight_format(asked.weights, cache.shape),
        read_lengths(Path(asked.trace), asked.first),
        parse_slo(asked.slo),
        utilization=asked.utilization,
        other_bytes=None if asked.other_gib is None else round(asked.other_gib * GIB),
        max_num_seqs=asked.max_num_seqs,
        bandwidth_share=asked.bandwidth_share,
        flops_share=asked.flops_share,
    )
    bounds = sorted(map(chooser.bound, _wanted(asked)), key=_order)
    section = answer.section(f"cards for {Path(asked.trace).name} at p99 {asked.slo}, at least")
    for bound in bounds:
        section.row(bound.card.name, _text(bound))
    section.row("note", f"lower bounds by data sheets ({ERROR}); bursts and queues need more")
    for bound in bounds:
        if bound.shares:
            shares = ", ".join(f"{name} {share:.3f}" for name, share in bound.shares.items())
            section.step(f"{bound.card.name}: of one replica with {bound.num_blocks:,} blocks: {shares}")
    answer.set(cards=[_values(bound) for bound in bounds])


def _wanted(asked: PlanRequest) -> list[Card]:
    assert asked.cards is not None
    named = asked.cards.strip().lower() != "all"
    found = [find_card(name) for name in asked.cards.split(",")] if named else list(all_cards())
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
