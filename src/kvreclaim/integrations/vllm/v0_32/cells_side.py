"""Attention over cells in vLLM 0.32: our own back-ends, registered instead of four of vLLM's.

Each is vLLM's back-end with a builder that adds the step's tables of cells and an implementation that attends
by them where there are some; writing keys and values, and steps in which no head has cells of its own, are
vLLM's. They are registered in workers with unequal heads alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.refusals import signatures
from kvreclaim.integrations.vllm.settings.groups import full_group
from kvreclaim.integrations.vllm.v0_32 import probing
from kvreclaim.integrations.vllm.worker.cells.grid import find_grid
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables, StepCells
from kvreclaim.integrations.vllm.worker.cells.limits import TableLimits
from kvreclaim.integrations.vllm.worker.cells.self_test import prove_cells
from kvreclaim.integrations.vllm.worker.layouts import CacheViews

HERE = "kvreclaim.integrations.vllm.v0_32"
CELL_BACKENDS = {
    "CPU_ATTN": f"{HERE}.cells_cpu.CellsCPUBackend",
    "FLASH_ATTN": f"{HERE}.cells_flash.CellsFlashBackend",
    "TRITON_ATTN": f"{HERE}.cells_triton.CellsTritonBackend",
    "FLASHINFER": f"{HERE}.cells_flashinfer.CellsFlashInferBackend",
}
"""vLLM's name of a back-end -> ours in its place."""


def register_cells(enable: bool) -> None:
    """Register our back-ends instead of vLLM's, or restore vLLM's. Call it before the model is made."""
    for name, path in CELL_BACKENDS.items():
        backend = AttentionBackendEnum[name]
        if enable:
            register_backend(backend, path)
        elif backend.get_path() == path:
            backend.clear_override()
    selector._cached_get_attn_backend.cache_clear()


@dataclass(frozen=True, slots=True, eq=False)
class LayerCells:
    """index: of the layer; view: [entries, 1, S, 2D] all cells."""

    index: int
    view: Tensor


class CellsBuilder:
    """Mixed into a builder of attention metadata. reclaim: set by adopt_cells."""

    reclaim: HeadTables | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own metadata with the step's cells in `reclaim_cells`."""
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)  # type: ignore[misc]
        if self.reclaim is not None:
            metadata.reclaim_cells = take(self.reclaim, common_attn_metadata)
        return metadata


def take(heads: HeadTables, common: Any) -> StepCells | None:
    """Return the cells of the step with this metadata of vLLM."""
    bound = common.seq_lens_cpu_upper_bound
    longest = common.max_seq_len if bound is None else int(bound[: common.num_reqs].max())
    return heads.take(
        common.block_table_tensor[: common.num_reqs],
        common.seq_lens[: common.num_reqs],
        common.query_start_loc[: common.num_reqs + 1],
        common.num_actual_tokens,
        common.max_query_len,
        longest,
        common.query_start_loc_cpu,
    )


class CellsImpl:
    """Mixed into an implementation of attention. reclaim: set by adopt_cells."""

    reclaim: LayerCells | None = None
    kernel = ""
    """Name of the kernel that attends over cells, for the log."""

    @property
    def without_cells(self) -> str | None:
        """Return the reason why this layer cannot attend over cells; None if it can."""
        return None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return whether vLLM may request scaled integers as output; not over cells."""
        return False

    def attend_cells(
        self, layer: Any, rows: Tensor, output: Tensor, step: StepCells, metadata: Any = None
    ) -> None:
        """Write what rows [T * K, G, D] see into output, of their shape; both contiguous. metadata: vLLM's
        own of the step, which says how keys may be split; None: as the kernel likes."""
        raise NotImplementedError

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Call vLLM's own method where some requests are not over cells, and attend over the step's cells."""
        step: StepCells | None = getattr(attn_metadata, "reclaim_cells", None)
        if step is None or step.tokens is not None:
            super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if step is None:
            return output
        assert output_scale is None, "a fused output scale was refused at start"
        assert output_block_scale is None, "a fused output scale was refused at start"
        own = slice(attn_metadata.num_actual_tokens) if step.tokens is None else step.tokens
        rows = step.rows_of(query[own])
        answers = torch.empty_like(rows)
        self.attend_cells(layer, rows, answers, step, attn_metadata)
        into = output[own]
        step.put_back(answers, into)
        if step.tokens is not None:
            output[own] = into
        return output


class CellsBackend:
    """Mixed into a back-end of attention."""

    cells_impl: type[CellsImpl]
    cells_builder: type[CellsBuilder]

    @classmethod
    def get_impl_cls(cls) -> type[CellsImpl]:
        return cls.cells_impl

    @classmethod
    def get_builder_cls(cls) -> type[CellsBuilder]:
        return cls.cells_builder


def adopt_cells(runner: Any, views: CacheViews, limits: TableLimits | None) -> HeadTables:
    """Prove the back-ends' attention over cells, and have them attend by the tables that are returned.

    limits: of tables that CUDA graphs read, which never move; None: tables grow

    Raises: UnsupportedModelError, in words for the middle of a sentence, where heads have to stay equal;
        UnsupportedVllmError.
    """
    layers = probing.attention_layers(runner)
    for layer in layers:
        _check_layer(layer)
    signatures.check_cells(layers)
    grid = find_grid(views)
    for index, layer in enumerate(layers):
        layer.impl.reclaim = LayerCells(index, grid.view)
    prove_cells(views, grid, [probing.shape_of(layer) for layer in layers], _attend(layers))
    fixed, most = (None, None) if limits is None else (limits.tokens, limits.after_pass)
    scheduler = runner.vllm_config.scheduler_config
    heads = HeadTables(grid, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, fixed, most)
    for builder in _builders(runner, {layer.layer_name for layer in layers}):
        builder.reclaim = heads
    return heads


def _check_layer(layer: Any) -> None:
    name = f"{layer.layer_name} ({layer.attn_backend.get_name()})"
    if not isinstance(layer.impl, CellsImpl):
        raise UnsupportedModelError(f"{name}: this back-end's attention takes one block table for all heads")
    if layer.impl.without_cells is not None:
        raise UnsupportedModelError(f"{name}: {layer.impl.without_cells}")
    if getattr(layer.impl, "sinks", None) is not None:
        raise UnsupportedModelError(f"{name}: every query head has a sink of its own")
    for scale in (layer._k_scale, layer._v_scale):
        if scale.numel() > 1:
            raise UnsupportedModelError(f"{name}: every KV head has an fp8 scale of its own")


def _attend(layers: list[Any]) -> Callable[[int, Tensor, StepCells], Tensor]:
    def attend(index: int, rows: Tensor, step: StepCells) -> Tensor:
        answers = torch.empty_like(rows)
        layers[index].impl.attend_cells(layers[index], rows, answers, step)
        return answers

    return attend


def _builders(runner: Any, names: set[str]) -> list[CellsBuilder]:
    """The builders of these layers, in the cache group that is compressed: a step's cells are taken once, and
    a drafter's may be there, too."""
    groups = runner.attn_groups[full_group(runner.kv_cache_config)]
    own = (group for group in groups if names.intersection(group.layer_names))
    return [builder for group in own for builder in group.metadata_builders]
