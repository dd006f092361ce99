"""Passes over unequal heads for policies that look at recent queries or at scores of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.policy import LayerSignals, Signal
from kvreclaim.integrations.vllm.cells.passes import CellQuestion, UnevenPasses
from kvreclaim.integrations.vllm.layer_signals import KeptSignals
from kvreclaim.memory.blocks import blocks_for


class SignalPasses(UnevenPasses):
    """UnevenPasses that know what hooks have kept."""

    def __init__(self, signals: KeptSignals, *args: Any) -> None:
        super().__init__(*args)
        self.signals = signals

    def _question_of(self, compressor: Compressor, *args: Any) -> CellQuestion:
        return _QuestionWithSignals(self.signals, compressor, self, *args)


class _QuestionWithSignals(CellQuestion):
    """The open block takes no part, so the queries and the next position are those before it."""

    def __init__(self, kept: KeptSignals, compressor: Compressor, *args: Any) -> None:
        super().__init__(*args)
        self.kept, self.compressor = kept, compressor

    def question(self) -> HeadsQuestion:
        plain, needs = super().question(), self.compressor.policy.needs
        if Signal.RECENT_QUERIES in needs:
            plain = replace(plain, logical_len=plain.logical_len - (self.one.num_tokens - self.full))

        def signals(layer: int) -> LayerSignals:
            found = self.kept.of_blocks(
                self.compressor, self.one.seq_id, layer, plain.logical_len, self.blocks, self.full
            )
            together = found.token_scores if plain.first else None  # later each head has its own
            return replace(found, positions=plain.signals(layer).positions, token_scores=together)

        def own(layer: int, head: int) -> Mapping[str, Tensor]:
            known = plain.own(layer, head)
            if self.kept.scores is None or Signal.TOKEN_SCORES not in needs:
                return known
            num_tokens = int(self.tokens[layer, head])
            cells = self.cells[layer, head, : blocks_for(num_tokens, self.owner.grid.block_size)]
            return {**known, "token_scores": self.kept.scores.of_cells(cells, num_tokens)}

        return replace(plain, signals=signals, own=own)
