"""FlashAttention 3 over the pool, for 16-bit caches on Hopper GPUs.

The planes of a layer, k [B, K, S, D] and v [B, K, S, Dv], are FlashAttention's pages [B, S, K, D] by their
strides, so nothing is copied. Cells (ops/cells.py) are pages with one KV head. Lengths and tables are read on
the device: a CUDA graph can replay the call.

Source: flash_attn_with_kvcache of github.com/Dao-AILab/flash-attention, hopper/flash_attn_interface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.kv_cache import LayerCache
from kvreclaim.ops.triton.plan import DecodeTables, Sequences, sequences_of


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """ops.backend.Backend: the Triton kernels, with FlashAttention 3 for layers without sinks.

    backend: ops.triton
    flash:   flash_attn_with_kvcache
    served:  number of KV heads of a cache that FlashAttention serves -> name of such caches
    """

    backend: Any
    flash: Callable[..., Tensor]
    served: Mapping[int, str]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def describe(self) -> str:
        """One line for the start of a run."""
        return f"{self.backend.describe()}, FlashAttention 3 for {' and '.join(self.served.values())}"

    def paged_attention(self, q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
        """Any number of queries per sequence. Triton serves windows over slots with positions of their
        own."""
        if self._serves(q, layer) and (layer.softmax.window is None or not batch.has_positions):
            return self._attend(q, layer, sequences_of(batch), batch.arrays.max_query_len)
        found: Tensor = self.backend.paged_attention(q, layer, batch)
        return found

    def decode_attention(self, q: Tensor, layer: LayerCache, tables: DecodeTables) -> Tensor:
        if self._serves(q, layer):
            return self._attend(q, layer, tables.seqs, 1)
        found: Tensor = self.backend.decode_attention(q, layer, tables)
        return found

    def _serves(self, q: Tensor, layer: LayerCache) -> bool:
        return layer.cache.num_kv_heads in self.served and layer.softmax.sinks is None and len(q) > 0

    def _attend(self, q: Tensor, layer: LayerCache, seqs: Sequences, max_query_len: int) -> Tensor:
        """[T, H, Dv]. The first dims of a query of a latent cache meet the values."""
        softmax, shape = layer.softmax, layer.cache.shape
        k, v = (plane.transpose(1, 2) for plane in layer.planes)
        return self.flash(
            q=q[..., shape.v_dim :] if shape.latent else q,
            qv=q[..., : shape.v_dim] if shape.latent else None,
            k_cache=k,
            v_cache=v,
            cache_seqlens=seqs.seq_lens,
            page_table=seqs.block_table,
            cu_seqlens_q=seqs.query_starts,
            max_seqlen_q=max_query_len,
            softmax_scale=softmax.scale,
            causal=True,
            window_size=(-1, -1) if softmax.window is None else (softmax.window - 1, 0),
            softcap=softmax.softcap or 0.0,
        )
