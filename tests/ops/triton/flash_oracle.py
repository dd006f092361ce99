"""A stand-in for FlashAttention 3: its signature and its checks, over PyTorch in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """The signature as published in hopper/flash_attn_interface.py (flash_attn_3, August 2026), and what its
    C++ checks of a paged cache with lengths of queries. Arguments that the project does not pass do nothing.

    Args:
        q: [T, H, D]; k_cache, v_cache: [B, S, K, D] of any strides with numbers of a row side by side
        qv: [T, H, Dv]: a second query, which meets v_cache; its scores are added
    """
    del cache_batch_idx, cache_leftpad, cu_seqlens_k_new, rotary_seqlens, q_descale, k_descale, v_descale
    del rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin
    assert k is None
    assert v is None
    assert rotary_cos is rotary_sin is None
    assert attention_chunk == 0
    assert causal
    assert not return_softmax_lse
    with torch._C.DisableTorchFunction():
        check(q, k_cache, v_cache, qv, page_table, cache_seqlens, cu_seqlens_q)
        starts, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
        assert max(b - a for a, b in pairwise(starts)) <= max_seqlen_q
        out = q.new_zeros(len(q), q.shape[1], v_cache.shape[-1])
        for row, length in enumerate(lengths):
            own = slice(starts[row], starts[row + 1])
            if length == 0 or own.start == own.stop:
                continue
            pages = page_table[row, : -(-length // k_cache.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[:length].float() for x in (k_cache, v_cache))
            group = q.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
            scores = q[own].float().transpose(0, 1) @ keys.mT
            if qv is not None:
                scores += qv[own].float().transpose(0, 1) @ values.mT
            scores *= softmax_scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            slots = torch.arange(length)
            places = torch.arange(length - (own.stop - own.start), length)[:, None]
            seen = slots <= places
            if window_size[0] >= 0:
                seen &= slots >= places - window_size[0]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
            out[own] = (weights @ values).transpose(0, 1).to(q.dtype)
        return out


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
) -> None:
    """TORCH_CHECKs of hopper/flash_api.cpp."""
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    assert all(x.stride(-1) == 1 for x in (q, k, v, page_table))
    assert all(x.dtype == torch.int32 for x in (page_table, cache_seqlens, cu_seqlens_q))
    assert cache_seqlens.is_contiguous()
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_q.shape == (len(page_table) + 1,)
    assert cache_seqlens.shape == (len(page_table),)
    assert q.shape[1] % k.shape[2] == 0
    assert q.shape[-1] == k.shape[-1]
    assert k.shape[:3] == v.shape[:3]
    assert q.shape[-1] % 8 == v.shape[-1] % 8 == 0
    if qv is not None:
        assert qv.stride(-1) == 1
        assert qv.shape == (*q.shape[:2], v.shape[-1])


@dataclass(slots=True)
class Calls:
    """Keyword arguments of each call."""

    flash: Callable[..., Tensor]
    made: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.made.append(kwargs)
        return self.flash(*args, **kwargs)
