"""Whether a budget fits the blocks of the pool."""

from __future__ import annotations

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.budget.footprint import Footprint


def check_blocks(footprint: Footprint, name: str) -> None:
    """Raise InvalidArgumentError for an eviction method that these blocks cannot serve."""
    size, budget, interval = footprint.block_size, footprint.budget, footprint.interval
    uneven, least = footprint.eviction_method.uneven, footprint.least_budget
    problem = _recall_problem(footprint)
    if uneven and interval < size:
        problem = (
            f"interval is {interval} tokens, but under {name} heads trade whole blocks of {size}, "
            f"and would have none to trade after the first pass; raise the interval to at least {size}"
        )
    elif budget < least:
        problem = (
            f"budget is {budget} tokens, but {name} goes by whole blocks of {size}, and those of "
            f"{footprint.sinks} sinks and {footprint.recent} recent tokens may take {least}; raise the "
            f"budget to {least}, or lower recent or block_size"
        )
    if problem is not None:
        raise InvalidArgumentError(f"{problem}.", field="compression")


def _recall_problem(footprint: Footprint) -> str | None:
    """Why recalled pages do not fit among the blocks of the budget; None if they do."""
    recall, size = footprint.recall, footprint.block_size
    if recall is None:
        return None
    budget, slots = footprint.budget, recall.slots(size)
    always = footprint.sinks + footprint.recent
    if budget % size:
        return (
            f"budget is {budget} tokens, but recalled pages take its last whole blocks of {size}; make it a "
            f"multiple, such as {max(1, budget // size) * size}"
        )
    if budget - slots <= always:
        return (
            f"budget is {budget} tokens, but {recall.blocks} recalled blocks of {size} with {always} sinks "
            f"and recent tokens leave no place; raise it above {always + slots}, or lower blocks"
        )
    least = max(slots, footprint.recent, footprint.window or 1)
    if footprint.interval < least:
        return (
            f"interval is {footprint.interval} tokens, but under recall it must cover the {slots} recalled "
            f"slots, the {footprint.recent} recent tokens and the policy's window; raise it to {least}"
        )
    return None
