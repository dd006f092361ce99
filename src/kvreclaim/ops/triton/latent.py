"""A decoder layer with multi-head latent attention.

    norm, down projections, norms and rotation and store, queries, absorb and rotate    (attend: the batch's)
    values, output, sum and norm, MLP

Eight launches in addition to attention and MLP; a batch that takes latents unstored stores them in one more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvreclaim.ops.kv_cache import LayerCache
from kvreclaim.ops.latent import UpProjection
from kvreclaim.ops.layer_parts import LatentHeads, LayerForm
from kvreclaim.ops.triton.decoder import DecoderLayer, Projection
from kvreclaim.ops.triton.latent_kernels import absorb_kernel, latent_kernel
from kvreclaim.ops.triton.layout import store_of
from kvreclaim.ops.triton.support import dot_precision, is_interpreted, keeps_16_bits, new_output, padded

MOST_ROWS = 64
"""Tokens that absorb_kernel multiplies; of more, torch's product reads the weights less often."""
BLOCK_T, BLOCK_N, BLOCK_K = 16, 128, 64
_KINDS: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def can_store(layer: LayerCache) -> bool:
    """Whether split_rows can store latents in this layer of a cache: in numbers as they are. The interpreter
    rounds to 16 bits outside of kernels (new_output)."""
    cache = layer.cache
    is_plain = cache.shape.latent and cache.format.is_plain and layer.softmax.keys is None
    return is_plain and not (is_interpreted() and cache.number != torch.float32)


def split_rows(
    rows: Tensor,
    angles: tuple[Tensor, Tensor],
    heads: LatentHeads,
    place: tuple[LayerCache, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries' latents [T, Q], normed, or queries as they are, and latents [T, R + dr] with rotated keys.

    Args:
        rows:   [T, Q + R + dr] contiguous
        angles: cos and sin [T, dr], each angle twice, or [T, dr / 2]
        place:  a layer for which can_store holds, and slots [T]; a negative slot is written nowhere
    """
    count, width = rows.shape[0], heads.rank + heads.rotary
    columns = rows.shape[1] - width
    latents, norm = new_output(rows, count, width), heads.q_norm
    q = rows[:, :columns] if norm is None else new_output(rows, count, columns)
    store = None if place is None else store_of(place[0])
    cos, sin = (each.contiguous() for each in angles)
    if count:
        latent_kernel[(count, 1 if norm is None else 2)](
            rows,
            rows if norm is None else norm.weight,
            heads.kv_norm.weight,
            cos,
            sin,
            q,
            latents,
            latents if store is None else store.k,
            latents if store is None else store.v,
            rows if place is None else place[1],
            0.0 if norm is None else norm.eps,
            heads.kv_norm.eps,
            Q=columns,
            R=heads.rank,
            ROTARY=heads.rotary,
            ANGLES=cos.shape[1],
            NEIGHBOURS=heads.turns_neighbours,
            Q_FROM_ONE=norm is not None and norm.from_one,
            KV_FROM_ONE=heads.kv_norm.from_one,
            IS_STORED=place is not None,
            BLOCK_Q=padded(columns),
            BLOCK_R=padded(heads.rank),
            BLOCK_HALF=padded(heads.rotary // 2),
            num_warps=4,
        )
    return q.to(rows.dtype), latents.to(rows.dtype)


def absorb(q: Tensor, angles: tuple[Tensor, Tensor], heads: LatentHeads, w_uk: Tensor) -> Tensor:
    """UpProjection.absorb with rotation: queries [T, H, dn + dr] and w_uk [H, dn, R] -> [T, H, R + dr].
    Tokens of q may lie in any stride."""
    if q.shape[0] > MOST_ROWS:
        return UpProjection(w_uk, w_uk).absorb(rotate_queries(q, angles, heads))
    return _absorb(q, angles, heads, w_uk)


def rotate_queries(q: Tensor, angles: tuple[Tensor, Tensor], heads: LatentHeads) -> Tensor:
    """Queries as of `absorb`, rotated: [T, H, dn + dr], a copy."""
    return _absorb(q, angles, heads, None)


def _absorb(q: Tensor, angles: tuple[Tensor, Tensor], heads: LatentHeads, weight: Tensor | None) -> Tensor:
    count, num_heads = q.shape[:2]
    width = heads.nope if weight is None else weight.shape[2]
    out = new_output(q, count, num_heads, width + heads.rotary)
    cos, sin = (each.contiguous() for each in angles)
    grid = (num_heads, triton.cdiv(width, BLOCK_N), triton.cdiv(count, BLOCK_T))
    if count:
        absorb_kernel[grid](
            q,
            q if weight is None else weight,
            cos,
            sin,
            out,
            count,
            STRIDE=q.stride(0),
            WEIGHT_STRIDE=0 if weight is None else weight.stride(0),
            HEADS=num_heads,
            NOPE=heads.nope,
            ROTARY=heads.rotary,
            WIDTH=width,
            ANGLES=cos.shape[1],
            NEIGHBOURS=heads.turns_neighbours,
            IS_ABSORBED=weight is not None,
            DTYPE=_KINDS[q.dtype] if keeps_16_bits(q.dtype) else tl.float32,
            PRECISION=dot_precision(q.device),
            BLOCK_T=BLOCK_T,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            BLOCK_HALF=padded(heads.rotary // 2),
            num_warps=4,
        )
    return out.to(q.dtype)


def values_of(attended: Tensor, weights: UpProjection) -> Tensor:
    """UpProjection.finish, contiguous: [T, H, R] -> [T, H, dv]."""
    if attended.device.type == "cpu" and attended.dtype != torch.float32:
        return weights.finish(attended)
    out = attended.new_empty((*attended.shape[:2], weights.w_uv.shape[1]))
    torch.bmm(attended.transpose(0, 1), weights.w_uv.transpose(1, 2), out=out.transpose(0, 1))
    return out


class LatentDecoderLayer(DecoderLayer):
    """A decoder layer without its attention, with rows of queries and latents."""

    def __init__(
        self, form: LayerForm, down: Projection, queries: Projection | None, out: Projection, *mlp: Any
    ) -> None:
        """down: of queries' latents, or of queries, and of latents; queries: of their normed latents."""
        super().__init__(form, down, out, *mlp)
        self.queries = queries

    def latents(
        self, x: Tensor, angles: tuple[Tensor, Tensor], place: tuple[LayerCache, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """x [T, M] -> queries [T, H, dn + dr] before rotation, and latents [T, R + dr], as of split_rows."""
        heads = self.form.latents
        assert heads is not None
        q, latents = split_rows(self.qkv(x), angles, heads, place)
        if self.queries is not None:
            q = self.queries(q)
        return q.unflatten(1, (-1, heads.nope + heads.rotary)), latents
