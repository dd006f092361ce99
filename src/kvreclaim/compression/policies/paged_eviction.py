"""PagedEviction: whole blocks of little weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvreclaim.compression.policy import CompressionPolicy, LayerView, Mode
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

_SMALLEST = 1e-6


@dataclass(frozen=True)
class PagedEviction(CompressionPolicy):
    """Evicts the blocks whose tokens have, on average, large keys and small values:

        score = |v| / |k|

    and the blocks with the least mean over their tokens, layers and KV heads go. A block that goes is
    free in every layer, so memory comes back without moving a byte; in exchange a good token in a bad
    block is lost, and what is kept is a whole number of blocks.

    Paper: arXiv 2509.04377, which drops one block whenever a new one has filled: here an interval of
    one block's tokens. Longer intervals drop several at once. Of a prompt the paper drops single tokens
    before they are put into blocks; here prompts are computed into their blocks, and whole ones go.

    Cost: two norms per token, no state.
    """

    name = "paged_eviction"
    eviction_method = EvictionMethod.BLOCKS
    default_mode = Mode.UNION

    def score(self, view: LayerView) -> Tensor:
        return view.source.value_norms() / view.source.key_norms().clamp(min=_SMALLEST)
