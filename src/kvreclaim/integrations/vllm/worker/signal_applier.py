"""Passes for policies that look at the inputs of layers: recent queries, scores of hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor, SignalSource
from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.policy import LayerSignals, Signal
from kvreclaim.compression.stats import LayerStats
from kvreclaim.engine.signals.slot_scores import DTYPE, ScorePlanes
from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.settings.layer_needs import query_window
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.worker.applier import Applier, RunnerRows, gone_requests
from kvreclaim.integrations.vllm.worker.cells.grid import CellGrid
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables
from kvreclaim.integrations.vllm.worker.cells.passes import CellQuestion, UnevenPasses
from kvreclaim.integrations.vllm.worker.layer_signals import KeptSignals
from kvreclaim.integrations.vllm.worker.layouts import CacheViews, JoinedLayout
from kvreclaim.integrations.vllm.worker.staging import Stage
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.schedule.budget.compaction import Pass


class Watching(Protocol):
    """Hooks on the layers, which pass their inputs to signals."""

    def show_to(self, signals: KeptSignals) -> None: ...


class SignalApplier(Applier):
    """Applier that keeps recent queries, or scores per slot, as the engine's policy needs."""

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


class SignalPasses(UnevenPasses):
    """UnevenPasses with the signals of hooks."""

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


def make_scores(views: CacheViews, grid: CellGrid | None) -> ScorePlanes:
    """Zeros for all slots. grid: of unequal heads; its cells name the same scores.

    Raises: UnsupportedModelError if a slot of the cache is no whole number of equal units.
    """
    first = views.layers[0].cache
    if grid is None:
        planes = torch.zeros((len(views.layers), *first.shape[:3], 1), dtype=DTYPE, device=first.device)
        return ScorePlanes([planes[n] for n in range(len(planes))], planes.view(-1, 1, first.shape[2], 1))
    unit = first.shape[-1]
    if any(step % unit for step in (*first.stride()[:3], *_offsets(views))):
        raise UnsupportedModelError(
            f"kv_compression keeps a score beside each slot of {unit} numbers, and this cache has strides of "
            f"{first.stride()}, which are no multiples of that; take a policy with equal heads, or another "
            "--attention-backend."
        )
    blocks, heads, slots = (step // unit for step in first.stride()[:3])
    starts = [offset // unit for offset in _offsets(views)]
    last = max(starts) + sum(
        (n - 1) * step for n, step in zip(first.shape[:3], (blocks, heads, slots), strict=True)
    )
    flat = torch.zeros(last + 1, dtype=DTYPE, device=first.device)
    shape, strides = (*first.shape[:3], 1), (blocks, heads, slots, 1)
    cells = flat.as_strided((len(grid.view), 1, grid.block_size, 1), _cell_strides(grid, unit), 0)
    return ScorePlanes([flat.as_strided(shape, strides, start) for start in starts], cells)


def _offsets(views: CacheViews) -> list[int]:
    """Numbers from the first of all layers to each."""
    offsets = [int(layer.cache.storage_offset()) for layer in views.layers]
    return [offset - min(offsets) for offset in offsets]


def _cell_strides(grid: CellGrid, unit: int) -> tuple[int, int, int, int]:
    cell, head, slot, _ = (step // unit for step in grid.view.stride())
    return cell, head, slot, 1
