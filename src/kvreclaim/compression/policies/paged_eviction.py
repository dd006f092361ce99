"""PagedEviction: eviction of whole blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Mode
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

_SMALLEST = 1e-6


@dataclass(frozen=True)
class PagedEviction(CompressionPolicy):
    """Evicts the blocks with large keys and small values on average:

        score = |v| / |k|

    and the blocks with the lowest mean over their tokens, layers and KV heads are evicted. An evicted block
    is free in every layer, so no bytes move. In exchange a good token in a bad block is lost, and the
    kept tokens fill a whole number of blocks.

    Paper: arXiv 2509.04377, which drops one block whenever a new one has filled: here an interval of
    one block's tokens. Longer intervals drop several at once. Of a prompt the paper drops single tokens
    before they are put into blocks; here prompts are computed into their blocks, and whole ones go.

    Cost: two norms per token, no state.
    """

    name = "paged_eviction"
    any_layers = True
    eviction_method = EvictionMethod.BLOCKS
    default_mode = Mode.UNION

    def score(self, view: LayerView) -> Tensor:
        return view.source.value_norms() / view.source.key_norms().clamp(min=_SMALLEST)
