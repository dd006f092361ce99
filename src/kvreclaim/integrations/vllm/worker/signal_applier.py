"""Passes for policies that look at the inputs of layers: recent queries, scores of hidden states."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvreclaim.compression.compressor import SignalSource
from kvreclaim.compression.policy import LayerSignals, Signal
from kvreclaim.compression.stats import LayerStats
from kvreclaim.engine.signals.slot_scores import DTYPE, ScorePlanes
from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.settings.layer_needs import query_window
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.worker.applier import Applier, RunnerRows
from kvreclaim.integrations.vllm.worker.cells.grid import CellGrid
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables
from kvreclaim.integrations.vllm.worker.layer_signals import KeptSignals
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.ops.facts import ModelFacts


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
        max_tokens: int = 0,
    ) -> None:
        policy, scores = options.settings.make_policy(), None
        if Signal.TOKEN_SCORES in policy.needs:
            scores = make_scores(views, None if heads is None else heads.grid)
            views = views.joining(scores.layers)
        self.signals = KeptSignals(facts, query_window(policy, views.block_size), stats, scores)
        super().__init__(options, facts, stats, views, rows, heads, max_tokens)
        watching.show_to(self.signals)

    def _rehearsed_signals(self, blocks: Tensor, num_tokens: int) -> SignalSource:
        layer, policy = self.facts.layers[0], self.options.settings.make_policy()
        queries = torch.zeros((layer.num_heads, policy.query_window, layer.head_dim), device=blocks.device)
        scores = torch.zeros((layer.num_kv_heads, num_tokens), device=blocks.device)
        return lambda _: LayerSignals(queries=queries, token_scores=scores)


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
