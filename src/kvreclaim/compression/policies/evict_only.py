"""Drop tokens, move nothing: the paradox, for measurement."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.compression.policy import Trait, Wrapper
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


@dataclass(frozen=True)
class EvictOnly(Wrapper):
    """Evicts what another policy would, but leaves the survivors where they are.

    A block comes free only if all its tokens happen to go: at keep ratio r and block size b about
    (1 - r)^b of the blocks, 1.5e-5 at r = .5, b = 16.

    inner: the policy that ranks the tokens; it must evict and compact itself
    Cost: that of inner.
    """

    name = "evict_only"
    eviction_method = EvictionMethod.MASK
    unfit = tuple(trait for trait in Trait if trait is not Trait.LIFTS)
    remedy = (
        "wrap a policy that evicts, compacts and keeps equal counts at original positions, such as "
        "evict_only(query_mixture)"
    )
