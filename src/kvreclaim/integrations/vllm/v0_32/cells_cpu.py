"""vLLM 0.32's attention on CPUs, over cells: a block of a head is contiguous, so a cell is a block."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvreclaim.integrations.vllm.v0_32.cells_side import CellsBackend, CellsBuilder, CellsImpl
from kvreclaim.integrations.vllm.worker.cells.heads import StepCells


class CellsCPUBuilder(CellsBuilder, CPUAttentionMetadataBuilder):
    """vLLM's metadata builder, with cells."""


class CellsCPUImpl(CellsImpl, CPUAttentionBackendImpl):
    """vLLM's kernel with one KV head, and a row for each (request, KV head)."""

    kernel = "vLLM's CPU kernel"

    def attend_cells(
        self, layer: Any, rows: Tensor, output: Tensor, step: StepCells, metadata: Any = None
    ) -> None:
        assert self.reclaim is not None, "adopt_cells has set it"
        view, index = self.reclaim.view, self.reclaim.index
        lengths = step.lengths[index]
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=rows.shape[1],
            num_kv_heads=1,
            head_dim=self.head_size,
            seq_lens=lengths,
            dtype=rows.dtype,
            query_start_loc=step.starts,
            causal=True,
            sliding_window_size=-1,
            isa=layer.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        keys, values = view.view(view.shape[0], 1, 2 * view.shape[2], -1).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=rows,
            key_cache=keys,
            value_cache=values,
            output=output,
            query_start_loc=step.starts,
            seq_lens=lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=step.tables[index],
            softcap=self.logits_soft_cap,
            scheduler_metadata=plan,
            s_aux=None,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class CellsCPUBackend(CellsBackend, CPUAttentionBackend):
    """CPU_ATTN, with cells."""

    cells_impl, cells_builder = CellsCPUImpl, CellsCPUBuilder
