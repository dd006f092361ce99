"""Attention and K/V writes of the native back-end; ops/reference.py says what each function does."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops import reference
from kvreclaim.ops.backend import Need
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.native.extension import batch_view, cache_view, native, unavailable_reason

DTYPES = (torch.float32, torch.bfloat16)
CHUNK = 16
"""Tokens that the kernels take at once; a block has to be a multiple."""


def unsupported_reason(need: Need) -> str | None:
    """Why the native kernels cannot serve this model; None if they can."""
    first = need.layers[0]
    dims = (first.head_dim, first.v_head_dim)
    if need.device.type != "cpu":
        return f"the native kernels run on CPUs, not on {need.device.type}"
    if need.dtype not in DTYPES:
        return f"dtype {need.dtype} is neither float32 nor bfloat16"
    if need.block_size % CHUNK:
        return f"block size {need.block_size} is no multiple of {CHUNK}"
    if any(dim % 8 for dim in dims):
        return f"head dims {dims} are no multiples of 8"
    return unavailable_reason()


def allocate(layers: tuple[LayerFacts, ...], num_blocks: int, block_size: int, *, like: Tensor) -> KVCache:
    """An all-zero cache with the dtype of `like`; see csrc/include/kvreclaim/layout.h for the layout.

    Raises: InvalidArgumentError where unsupported_reason says so.
    """
    problem = unsupported_reason(Need(layers, block_size, like.dtype, like.device))
    if problem is not None:
        raise InvalidArgumentError(f"kernels is 'native', which cannot run here: {problem}.")
    first = layers[0]
    shape = (len(layers), num_blocks, first.num_kv_heads)
    dim = first.head_dim
    inner = (dim // 2, block_size, 2) if like.dtype == torch.bfloat16 else (dim, block_size)
    return KVCache(
        _zeros(like, (*shape, *inner)),
        _zeros(like, (*shape, block_size, first.v_head_dim)),
    )


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros in huge pages where the system gives them: blocks lie at random places."""
    tensor = like.new_empty(shape)
    native().advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor.zero_()


def write_kv(cache: KVCache, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """reference.write_kv; k and v with any strides, fp32 or bf16 (rounded to nearest even)."""
    native().write_kv(cache_view(cache), layer, k, v, slot_mapping)


def gather_tokens(tokens: PagedTokens) -> tuple[Tensor, Tensor]:
    """reference.gather_tokens: keys [K, T, D] and values [K, T, Dv], copies."""
    cache = tokens.cache
    k = cache.k.new_empty((cache.num_kv_heads, tokens.num_tokens, cache.head_dim))
    v = cache.v.new_empty((cache.num_kv_heads, tokens.num_tokens, cache.v_head_dim))
    native().gather_tokens(cache_view(cache), tokens.layer, tokens.block_ids, k, v)
    return k, v


def paged_attention(
    q: Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """reference.paged_attention: q [T, H, D] with any strides, fp32 or bf16 -> [T, H, Dv], dtype of q.

    Keys are cut at fixed slots and the parts merged, so that one long sequence uses all threads and a row
    depends neither on the rest of the batch nor on the number of threads.
    """
    out = q.new_empty((q.shape[0], q.shape[1], cache.v_head_dim))
    sinks = sinks if sinks is None or sinks.dtype == torch.float32 else sinks.float()
    native().paged_attention(
        q, out, cache_view(cache), layer, batch_view(batch), scale, softcap or 0.0, window or 0, sinks
    )
    return out


def prepare_blocks(cache: KVCache, block_ids: list[int]) -> None:
    """Nothing to do: the kernels never let a slot past a sequence's length into a sum."""


copy_blocks = reference.copy_blocks
"""Whole blocks, whatever lies in them: the reference's index copy serves every layout."""
