"""Drop tokens, move nothing: the paradox, for measurement."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Mode, Signal
from kvreclaim.errors import InvalidArgumentError


@dataclass(frozen=True)
class EvictOnly(CompressionPolicy):
    """Evicts what another policy would, but leaves the survivors where they are.

    A block comes free only if all its tokens happen to go: at keep ratio r and block size b about
    (1 - r)^b of the blocks, 1.5e-5 at r = .5, b = 16.

    inner: the policy that ranks the tokens; it must evict and compact itself
    Cost: that of inner.
    """

    inner: CompressionPolicy
    name = "evict-only"
    compacts = False

    def __post_init__(self) -> None:
        if not (self.inner.evicts and self.inner.compacts):
            raise InvalidArgumentError(
                f"evict-only({self.inner.name}) is a contradiction; wrap a policy that evicts and compacts, "
                "such as evict-only(query_mixture)."
            )

    @property
    def needs(self) -> frozenset[Signal]:
        return self.inner.needs

    @property
    def default_mode(self) -> Mode:
        return self.inner.default_mode

    def score(self, view: LayerView) -> Tensor:
        return self.inner.score(view)
