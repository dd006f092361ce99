"""Passes of an engine whose policy looks at what its layers were given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor, SignalSource
from kvreclaim.compression.policy import LayerSignals, Signal
from kvreclaim.compression.stats import LayerStats
from kvreclaim.integrations.vllm.applier import Applier, RunnerRows, gone_requests
from kvreclaim.integrations.vllm.cells.heads import HeadTables
from kvreclaim.integrations.vllm.cells.signal_passes import SignalPasses
from kvreclaim.integrations.vllm.layer_signals import KeptSignals
from kvreclaim.integrations.vllm.layouts import CacheViews, JoinedLayout
from kvreclaim.integrations.vllm.options import Options
from kvreclaim.integrations.vllm.score_planes import make_scores
from kvreclaim.integrations.vllm.staging import Stage
from kvreclaim.integrations.vllm.watched import query_window
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.schedule.budget.compaction import Pass


class Watching(Protocol):
    """Hooks on the layers, which show what they see to signals."""

    def show_to(self, signals: KeptSignals) -> None: ...


class SignalApplier(Applier):
    """Applier that keeps recent queries, or scores beside the slots, as the engine's policy asks."""

    def __init__(
        self,
        watching: Watching,
        options: Options,
        facts: ModelFacts,
        stats: tuple[LayerStats, ...] | None,
        views: CacheViews,
        rows: RunnerRows,
        heads: HeadTables | None = None,
    ) -> None:
        policy, scores = options.settings.make_policy(), None
        if Signal.TOKEN_SCORES in policy.needs:
            scores = make_scores(views, None if heads is None else heads.grid)
            views = views.joining(scores.layers)
        self.signals = KeptSignals(facts, query_window(policy, views.block_size), stats, scores)
        super().__init__(options, facts, stats, views, rows, heads)
        watching.show_to(self.signals)

    def begin(self, scheduler_output: Any) -> None:
        self.signals.forget(gone_requests(scheduler_output))
        super().begin(scheduler_output)

    def _uneven_passes(self, heads: HeadTables, head_stage: Stage | None) -> SignalPasses:
        grid, scores = heads.grid, self.signals.scores
        if scores is not None:
            grid = replace(grid, layout=JoinedLayout(grid.layout, scores.cells))
        return SignalPasses(self.signals, self.views, grid, heads, self.stage, head_stage)

    def _signals(self, one: Pass[str], compressor: Compressor, blocks: Tensor) -> SignalSource:
        return lambda layer: self.signals.of_blocks(
            compressor, one.seq_id, layer, one.logical_len, blocks, one.num_tokens
        )

    def _rehearsed_signals(self, blocks: Tensor, num_tokens: int) -> SignalSource:
        layer, policy = self.facts.layers[0], self.options.settings.make_policy()
        queries = torch.zeros((layer.num_heads, policy.query_window, layer.head_dim), device=blocks.device)
        scores = torch.zeros((layer.num_kv_heads, num_tokens), device=blocks.device)
        return lambda _: LayerSignals(queries=queries, token_scores=scores)
