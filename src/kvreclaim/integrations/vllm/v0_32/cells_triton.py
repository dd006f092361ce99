"""vLLM 0.32's own Triton kernel over cells, in any layout that strides describe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.ops import triton_unified_attention
from vllm.v1.kv_cache_interface import KVQuantMode

from kvreclaim.integrations.vllm.v0_32.attention import FP8
from kvreclaim.integrations.vllm.v0_32.cells_side import CellsBackend, CellsBuilder, CellsImpl
from kvreclaim.integrations.vllm.worker.cells.heads import StepCells

FP32_BYTES = 4


class CellsTritonBuilder(CellsBuilder, TritonAttentionMetadataBuilder):
    """vLLM's metadata builder, with cells."""


class CellsTritonImpl(CellsImpl, TritonAttentionImpl):
    """vLLM's kernel with one KV head, and a row for each (request, KV head)."""

    kernel = "vLLM's Triton kernel"

    def attend_cells(
        self, layer: Any, rows: Tensor, output: Tensor, step: StepCells, metadata: Any = None
    ) -> None:
        assert self.reclaim is not None, "adopt_cells has set it"
        view, index = self.reclaim.view.transpose(1, 2), self.reclaim.index
        if self._kv_quant_mode.is_per_token_head:
            self._attend_slots(rows, view, output, step, index, metadata)
            return
        keys, values = view.split(self.head_size, dim=-1)
        if self.kv_cache_dtype in FP8:
            keys, values = keys.view(self.fp8_dtype), values.view(self.fp8_dtype)
        is_quantized = self._kv_quant_mode == KVQuantMode.FP8_PER_TENSOR
        scales = (step.lengths.shape[1], 1)
        attend_unified(
            rows,
            keys,
            values,
            output,
            step,
            index,
            self.scale,
            self.logits_soft_cap,
            metadata,
            q_descale=layer._q_scale if is_quantized and rows.dtype == self.fp8_dtype else None,
            k_descale=layer._k_scale.expand(scales),
            v_descale=layer._v_scale.expand(scales),
            kv_quant_mode=self._kv_quant_mode,
            use_td=self.use_td,
        )

    def _attend_slots(
        self, rows: Tensor, view: Tensor, output: Tensor, step: StepCells, layer: int, metadata: Any
    ) -> None:
        """Attend over cells with scales in slots: numbers of the key, scale, numbers of the value, scale."""
        keys, values = view.split(view.shape[-1] // 2, dim=-1)
        k_scales, v_scales = (x[..., -FP32_BYTES:].view(torch.float32)[..., 0] for x in (keys, values))
        stored = {
            KVQuantMode.INT8_PER_TOKEN_HEAD: torch.int8,
            KVQuantMode.FP8_PER_TOKEN_HEAD: self.fp8_dtype,
            KVQuantMode.INT4_PER_TOKEN_HEAD: torch.uint8,
        }[self._kv_quant_mode]
        attend_unified(
            rows,
            keys.view(stored),
            values.view(stored),
            output,
            step,
            layer,
            self.scale,
            self.logits_soft_cap,
            metadata,
            kv_quant_mode=self._kv_quant_mode,
            k_scale_cache=k_scales,
            v_scale_cache=v_scales,
            use_td=self.use_td,
        )


def attend_unified(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    step: StepCells,
    layer: int,
    scale: float,
    softcap: float,
    metadata: Any,
    **quantization: Any,
) -> None:
    """vLLM's Triton kernel over cells.

    Args:
        rows:         [T * K, G, D]; output has the same shape
        keys, values: [entries, S, 1, D] in any strides
        metadata:     TritonAttentionMetadata of the step, with buffers for split keys; None: no splits
        quantization: of vLLM's kernel: descales or caches of scales, kv_quant_mode and use_td
    """
    nothing = {"q_descale": None, "k_descale": None, "v_descale": None}
    triton_unified_attention.unified_attention(
        q=rows,
        k=keys,
        v=values,
        out=output,
        cu_seqlens_q=step.starts,
        max_seqlen_q=step.max_query_len,
        seqused_k=step.lengths[layer],
        max_seqlen_k=step.max_seq_len,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1),
        block_table=step.tables[layer],
        softcap=softcap,
        **{**nothing, **quantization, **({} if metadata is None else _splits(metadata, step.num_heads))},
    )


def _splits(metadata: Any, num_heads: int) -> dict[str, Any]:
    """Return vLLM's buffers for split keys [T, K G, ...] as those of rows [T K, G, ...], and the rows up to
    which keys are split."""
    names = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
    buffers = {name: getattr(metadata, name) for name in names}
    return {
        "seq_threshold_3D": metadata.seq_threshold_3D * num_heads,
        "num_par_softmax_segments": metadata.num_par_softmax_segments,
        **{name: x.unflatten(1, (num_heads, -1)).flatten(0, 1) for name, x in buffers.items()},
    }


class CellsTritonBackend(CellsBackend, TritonAttentionBackend):
    """TRITON_ATTN, with cells."""

    cells_impl, cells_builder = CellsTritonImpl, CellsTritonBuilder
