"""What may make a policy unfit to be wrapped by another one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from kvreclaim.schedule.budget.way import Way


class Trait(StrEnum):
    """A reason, as it ends a sentence."""

    KEEPS_ALL = "keeps everything, so that there is nothing to rank"
    UNMOVED = "moves nothing"
    WHOLE_BLOCKS = "evicts whole blocks, not tokens"
    UNEVEN = "lets heads keep unequal numbers of tokens"
    CACHE_RELATIVE = "takes a token's slot for its position"
    LIFTS = "lifts scores within a head, which says nothing between heads"


TRAIT_OF_WAY: Mapping[Way, Trait] = MappingProxyType(
    {
        Way.KEEP: Trait.KEEPS_ALL,
        Way.READS: Trait.KEEPS_ALL,
        Way.MASK: Trait.UNMOVED,
        Way.BLOCKS: Trait.WHOLE_BLOCKS,
        Way.CELLS: Trait.UNEVEN,
    }
)
