"""FlashInfer in vLLM 0.32 plans its kernels for one table. Over cells vLLM's Triton kernel attends, which
reads its layouts as they are; an fp8 cache would need its queries in fp8, too: heads stay equal there."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

from kvreclaim.integrations.vllm.v0_32.attention import FP8
from kvreclaim.integrations.vllm.v0_32.cells_side import CellsBackend, CellsBuilder, CellsImpl
from kvreclaim.integrations.vllm.v0_32.cells_triton import attend_unified
from kvreclaim.integrations.vllm.worker.cells.heads import StepCells


class CellsFlashInferBuilder(CellsBuilder, FlashInferMetadataBuilder):
    """vLLM's metadata builder, with cells. splits: makes the Triton kernel's buffers for split keys."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.splits = TritonAttentionMetadataBuilder(*args, **kwargs)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        metadata.reclaim_splits = self.splits.build(common_prefix_len, common_attn_metadata)
        return metadata


class CellsFlashInferImpl(CellsImpl, FlashInferImpl):
    """vLLM's Triton kernel with one KV head, and a row for each (request, KV head)."""

    kernel = "vLLM's Triton kernel"

    @property
    def without_cells(self) -> str | None:
        return "the cache is fp8" if self.kv_cache_dtype in FP8 else None

    def attend_cells(
        self, layer: Any, rows: Tensor, output: Tensor, step: StepCells, metadata: Any = None
    ) -> None:
        assert self.reclaim is not None, "adopt_cells has set it"
        keys, values = self.reclaim.view.transpose(1, 2).split(self.head_size, dim=-1)
        attend_unified(
            rows,
            keys,
            values,
            output,
            step,
            self.reclaim.index,
            self.scale,
            self.logits_soft_cap or 0.0,
            None if metadata is None else metadata.reclaim_splits,
        )


class CellsFlashInferBackend(CellsBackend, FlashInferBackend):
    """FLASHINFER, with cells."""

    cells_impl, cells_builder = CellsFlashInferImpl, CellsFlashInferBuilder
