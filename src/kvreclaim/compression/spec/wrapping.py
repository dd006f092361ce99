"""Reasons why a policy cannot be wrapped by another one."""

from __future__ import annotations

from enum import StrEnum

from kvreclaim.schedule.budget.eviction_method import EvictionMethod


class Trait(StrEnum):
    """A reason, as it ends a sentence."""

    KEEPS_ALL = "keeps everything, so that there is nothing to rank"
    WHOLE_BLOCKS = "evicts whole blocks, not tokens"
    UNEVEN = "lets heads keep unequal numbers of tokens"
    CACHE_RELATIVE = "takes a token's slot for its position"
    LIFTS = "lifts scores within a head, which says nothing between heads"


def unfit_to_wrap(method: EvictionMethod) -> Trait | None:
    """Why a policy of this method may be unfit; None: it ranks tokens, and equally many of each head stay."""
    if not method.evicts:
        return Trait.KEEPS_ALL
    if method.whole_blocks:
        return Trait.WHOLE_BLOCKS
    return Trait.UNEVEN if method.uneven else None
