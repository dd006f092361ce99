"""CUDA graphs of steps over cells, next to vLLM 0.32's own, which steps without compressed requests replay.

A second full graph of each batch size is captured over made-up requests with cells. Pieces between attention
layers (PIECEWISE) are the same for both. Split steps read lengths on the host: they run in pieces, or eager.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables, StepKind


@dataclass(frozen=True)
class CellsDescriptor(BatchDescriptor):
    """The key of a graph over cells; it never equals a BatchDescriptor."""


class CellsDispatch:
    """Mixed into the class of the V1 runner's dispatcher of graphs. reclaim: set by add_graphs."""

    reclaim: HeadTables

    def dispatch(self, *args: Any, invalid_modes: Collection[Any] | None = None, **kwargs: Any) -> Any:
        """Return the mode and the key of the step that was announced, or of a capture."""
        kind = self.reclaim.kind
        if kind is StepKind.SPLIT:
            invalid_modes = {*(invalid_modes or ()), CUDAGraphMode.FULL}
        mode, descriptor = super().dispatch(*args, invalid_modes=invalid_modes, **kwargs)  # type: ignore[misc]
        if kind is StepKind.CELLS and mode == CUDAGraphMode.FULL:
            descriptor = CellsDescriptor(**vars(descriptor))
        return mode, descriptor


class CellsGraphs:
    """Mixed into the class of the V2 runner's graphs. reclaim: set by add_graphs; over_cells: see there."""

    reclaim: HeadTables
    over_cells: dict[Any, Any]

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture vLLM's graphs, then the full ones over cells."""
        super().capture(*args, **kwargs)  # type: ignore[misc]
        own: Any = self
        plain, every = own.graphs, own._capture_descs
        own.graphs = self.over_cells = {}
        own._capture_descs = {mode: every[mode] for mode in every if mode == CUDAGraphMode.FULL}
        try:
            with self.reclaim.capture():
                super().capture(*args, **kwargs)  # type: ignore[misc]
        finally:
            own.graphs, own._capture_descs = plain, every

    @cached_property
    def _in_pieces(self) -> dict[Any, list[Any]]:
        every: dict[Any, list[Any]] = self._candidates  # type: ignore[attr-defined]
        return {
            key: [one for one in some if one.cg_mode != CUDAGraphMode.FULL] for key, some in every.items()
        }

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Return the descriptor of a step; a split one is never in a full graph."""
        own: Any = self
        every = own._candidates
        own._candidates = self._in_pieces if self.reclaim.kind is StepKind.SPLIT else every
        try:
            return super().dispatch(*args, **kwargs)  # type: ignore[misc]
        finally:
            own._candidates = every

    def run_fullgraph(self, desc: Any) -> Any:
        """Replay the graph that fits the step's metadata."""
        own: Any = self
        plain = own.graphs
        own.graphs = self.over_cells if self.reclaim.taken else plain
        try:
            return super().run_fullgraph(desc)  # type: ignore[misc]
        finally:
            own.graphs = plain


def add_graphs(owner: Any, mixin: type, heads: HeadTables) -> None:
    """Have vLLM's graphs of a runner, CudagraphDispatcher or ModelCudaGraphManager, know steps over cells."""
    owner.reclaim = heads
    if not isinstance(owner, mixin):
        owner.__class__ = type(f"Reclaim{type(owner).__name__}", (mixin, type(owner)), {})
