"""Caches of vLLM's KV dtypes whose slots hold scales, written and read by vLLM's own Triton kernels under
Triton's interpreter. usable_triton is to be imported before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from test_vllm_layouts import D, K, gpu_caches
from torch import Tensor
from vllm.model_executor.layers.quantization.turboquant.config import TQ_PRESETS, TurboQuantConfig
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend, TurboQuantAttentionImpl
from vllm.v1.attention.ops.triton_unified_attention import unified_attention
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvreclaim.integrations.vllm.v0_32.cells_triton import CellsTritonImpl

PER_TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
TURBOQUANT = tuple(TQ_PRESETS)
G, S, SCALE = 2, 16, 0.11


def spec_of(dtype: str) -> Any:
    """The spec that vLLM makes for a layer with this KV dtype."""
    backend = TurboQuantAttentionBackend if dtype in TURBOQUANT else TritonAttentionBackend
    mode, stored = get_kv_quant_mode(dtype), STR_DTYPE_TO_TORCH_DTYPE[dtype]
    plain = FullAttentionSpec(block_size=S, num_kv_heads=K, head_size=D, dtype=stored, kv_quant_mode=mode)
    return backend.customize_spec(plain)


def layers_of(dtype: str, layout: KVCacheLayout) -> list[Any]:
    """Attention layers as attention.py reads them, around vLLM's own implementations."""
    return [
        SimpleNamespace(
            layer_name=f"layer.{n}",
            attn_backend=TurboQuantAttentionBackend if dtype in TURBOQUANT else TritonAttentionBackend,
            kv_cache=cache,
            kv_cache_dtype=dtype,
            head_size=D,
            impl=impl_of(dtype),
        )
        for n, cache in enumerate(gpu_caches(layout, spec_of(dtype)))
    ]


def impl_of(dtype: str) -> Any:
    kind = TurboQuantAttentionImpl if dtype in TURBOQUANT else CellsTritonImpl
    impl: Any = object.__new__(kind)
    usual = {"num_heads": G * K, "num_kv_heads": K, "head_size": D, "scale": SCALE, "attn_type": "decoder"}
    if dtype in TURBOQUANT:
        usual |= {"tq_config": TurboQuantConfig.from_cache_dtype(dtype, D), "max_num_kv_splits": 2}
        usual |= {"_soa_store": False, "_use_flydsl": False}
    else:
        usual |= {"_kv_quant_mode": get_kv_quant_mode(dtype), "_is_per_token_head_quant": True}
        usual |= {"fp8_dtype": torch.float8_e4m3fn, "kv_cache_dtype": dtype}
        usual |= {"logits_soft_cap": 0.0, "use_td": False}
    for name, value in usual.items():
        setattr(impl, name, value)
    return impl


def attend(layer: Any, queries: Tensor, blocks: list[int], num_tokens: int) -> Tensor:
    """Output of one token's [H, D] attention to these blocks, by vLLM's kernel over the cache as it is."""
    table = torch.tensor([blocks], dtype=torch.int32)
    lengths = torch.tensor([num_tokens], dtype=torch.int32)
    if layer.kv_cache_dtype in TURBOQUANT:
        step = SimpleNamespace(block_table=table, seq_lens=lengths)
        cache = layer.kv_cache.transpose(1, 2)
        matrix, centroids = layer._tq_Pi, layer._tq_centroids
        found = layer.impl._decode_attention(queries[None], cache, step, matrix, centroids, matrix, layer)
        return found[0].float()
    keys, values = layer.impl._pth_key_value_caches(layer.kv_cache)
    output = torch.empty_like(queries[None])
    unified_attention(
        q=queries[None],
        k=keys,
        v=values,
        out=output,
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen_q=1,
        seqused_k=lengths,
        max_seqlen_k=num_tokens,
        softmax_scale=SCALE,
        causal=True,
        window_size=(-1, -1),
        block_table=table,
        softcap=0.0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        kv_quant_mode=layer.impl._kv_quant_mode,
        k_scale_cache=layer.impl._k_scale_cache,
        v_scale_cache=layer.impl._v_scale_cache,
    )
    return output[0]


def expected(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Softmax over tokens [K, T, D]: what one token [H, D] sees."""
    keys, values = (x.repeat_interleave(G, 0) for x in (keys, values))
    weights = (torch.einsum("hd,htd->ht", queries, keys) * SCALE).softmax(-1)
    return torch.einsum("ht,htd->hd", weights, values)
