"""FlashAttention in vLLM 0.32, over cells: one call, in any layout that it reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.platforms import current_platform
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from kvreclaim.integrations.vllm.v0_32.attention import FP8
from kvreclaim.integrations.vllm.v0_32.cells_side import CellsBackend, CellsBuilder, CellsImpl
from kvreclaim.integrations.vllm.worker.cells.heads import StepCells

MAX_SPLIT_ROWS = 992
"""FlashAttention 3 finds the splits of each row on the device up to here; more rows fill a GPU unsplit."""


class CellsFlashBuilder(CellsBuilder, FlashAttentionMetadataBuilder):
    """vLLM's metadata builder, with cells."""


class CellsFlashImpl(CellsImpl, FlashAttentionImpl):
    """vLLM's kernel with one KV head, and a row for each (request, KV head)."""

    kernel = "FlashAttention"

    def attend_cells(
        self, layer: Any, rows: Tensor, output: Tensor, step: StepCells, metadata: Any = None
    ) -> None:
        assert self.reclaim is not None, "adopt_cells has set it"
        view, index = self.reclaim.view.transpose(1, 2), self.reclaim.index
        keys, values = (
            canonicalize_singleton_dim_strides(part) for part in view.split(self.head_size, dim=-1)
        )
        if self.kv_cache_dtype in FP8:
            keys, values = (part.view(current_platform.fp8_dtype()) for part in (keys, values))
        scales = (num_rows := step.lengths.shape[1], 1)
        # A graph needs a bound, vLLM's own. The kernel schedules each layer by itself: lengths differ.
        num_splits = 0 if metadata is None else metadata.max_num_splits
        flash_attn.flash_attn_varlen_func(
            q=rows,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=step.starts,
            max_seqlen_q=step.max_query_len,
            seqused_k=step.lengths[index],
            max_seqlen_k=step.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            window_size=[-1, -1],
            block_table=step.tables[index],
            softcap=self.logits_soft_cap,
            fa_version=self.vllm_flash_attn_version,
            q_descale=layer._q_scale.expand(scales) if self.supports_quant_query_input else None,
            k_descale=layer._k_scale.expand(scales),
            v_descale=layer._v_scale.expand(scales),
            num_splits=min(num_splits, 1) if num_rows > MAX_SPLIT_ROWS else num_splits,
        )


class CellsFlashBackend(CellsBackend, FlashAttentionBackend):
    """FLASH_ATTN, with cells."""

    cells_impl, cells_builder = CellsFlashImpl, CellsFlashBuilder
