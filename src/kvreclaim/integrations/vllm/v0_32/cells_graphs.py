"""CUDA graphs of steps over cells, next to vLLM 0.32's own, which steps without compressed requests replay.

A second full graph of each batch size is captured over made-up requests with cells. Pieces between attention
layers (PIECEWISE) are the same for both. Split steps read lengths on the host: they run in pieces, or eager.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
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

    def dispatch(
        self, num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the descriptor of a step; a split one is never in a full graph."""
        if self.reclaim.kind is not StepKind.SPLIT:
            return super().dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)  # type: ignore[misc]
        own: Any = self
        every, own._candidates = (
            own._candidates,
            {
                key: [desc for desc in some if desc.cg_mode != CUDAGraphMode.FULL]
                for key, some in own._candidates.items()
                if key[0] == num_tokens
            },
        )
        try:
            return super().dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)  # type: ignore[misc]
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
