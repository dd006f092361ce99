"""A cache as kernels take it: what they are compiled for, and where the bytes of a layer lie."""

from __future__ import annotations

from functools import cache as once
from typing import NamedTuple

import torch
from torch import Tensor

from kvreclaim.kv_bytes import VectorBytes
from kvreclaim.ops.formats import scales
from kvreclaim.ops.formats.codecs import level_table
from kvreclaim.ops.formats.hadamard import block_of, sign_tensor
from kvreclaim.ops.kv_cache import KVCache, LayerCache
from kvreclaim.ops.triton.support import padded

FORMAT_IDS = {"fp8_e4m3": 1, "int8": 2, "int4": 3, "turboquant4": 4}
"""By which codes.py tells formats apart, those of 8 bits first; 0 is plain."""
LEVELS = 4096
"""Offset of turboquant4's 16 levels in its table; its 15 boundaries follow."""
BOUNDARIES = LEVELS + 16


class KernelLayout(NamedTuple):
    """A compile-time argument.

    K_FORMAT, V_FORMAT: FORMAT_IDS of keys and values, 0 for plain formats
    D, DV:        stored dims; a latent key has D behind the DV of its value
    BLOCK_D, BLOCK_DV: columns of a tile of them
    PARAMS:       bytes of parameters per slot; the last has the upper bits of scales of 12 bits
    V_PARAM:      the first one of the value
    K_LOG, V_LOG: a rotated format mixes 2^K_LOG dims of a key at a time; 0: nothing is rotated
    """

    K_FORMAT: int
    V_FORMAT: int
    KV_HEADS: int
    S: int
    D: int
    DV: int
    LATENT: bool
    BLOCK_D: int
    BLOCK_DV: int
    PARAMS: int = 0
    V_PARAM: int = 0
    K_LOG: int = 0
    V_LOG: int = 0


class LayerPlanes(NamedTuple):
    """One layer's planes and, of coded formats, the tables that turn codes into numbers; what a format has
    not is k.

    k, v:       rows of KernelLayout.D and DV numbers or codes, [B * K * S, ...]
    params:     uint8
    k_table, v_table: fp32; see `table`
    k_signs, v_signs: [D], [DV] fp32 of a rotated format
    """

    k: Tensor
    v: Tensor
    params: Tensor
    k_table: Tensor
    v_table: Tensor
    k_signs: Tensor
    v_signs: Tensor


class StridedRows(NamedTuple):
    """x: [T, heads, D], rows of D in any strides."""

    x: Tensor
    stride_t: int
    stride_h: int


def rows_in(x: Tensor) -> StridedRows:
    return StridedRows(x, x.stride(0), x.stride(1))


def layout_of(cache: KVCache) -> KernelLayout:
    """Made once per cache."""
    return cache.cached("triton.layout", _layout)


def store_of(layer: LayerCache) -> LayerPlanes:
    """Made once per layer."""
    return layer.cached("triton.store", _store)


def _layout(cache: KVCache) -> KernelLayout:
    shape, form = cache.shape, cache.format
    return KernelLayout(
        K_FORMAT=FORMAT_IDS.get(form.keys.name, 0),
        V_FORMAT=FORMAT_IDS.get(form.values.name, 0),
        KV_HEADS=shape.num_kv_heads,
        S=shape.block_size,
        D=shape.k_dim,
        DV=shape.v_dim,
        LATENT=shape.latent,
        BLOCK_D=padded(shape.k_dim),
        BLOCK_DV=padded(shape.v_dim),
        PARAMS=form.slot_params(shape.k_dim, shape.v_dim),
        V_PARAM=form.keys.param_bytes(shape.k_dim),
        K_LOG=_log2(block_of(shape.k_dim)) if form.keys.is_rotated else 0,
        V_LOG=_log2(block_of(shape.v_dim)) if form.values.is_rotated else 0,
    )


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _store(layer: LayerCache) -> LayerPlanes:
    cache = layer.cache
    shape, form, device = cache.shape, cache.format, cache.device
    k, v = layer.planes[:2]
    store = LayerPlanes(k, v, k, k, k, k, k)
    if form.is_plain:
        return store
    tables = table(form.keys, device), table(form.values, device)
    store = store._replace(params=layer.planes[2], k_table=tables[0], v_table=tables[1])
    if form.keys.is_rotated:
        store = store._replace(k_signs=sign_tensor(shape.k_dim, device))
    if form.values.is_rotated:
        store = store._replace(v_signs=sign_tensor(shape.v_dim, device))
    return store


@once
def table(form: VectorBytes, device: torch.device) -> Tensor:
    """Return the scale of every code, fp32; then turboquant4's levels and the boundaries between them."""
    if form.name == "turboquant4":
        steps = scales.TURBO.table(device).clone()
        steps[0] = 0.0
        return torch.cat((steps, *level_table(device)))
    codes = {"int8": scales.INT8, "fp8_e4m3": scales.FP8, "int4": scales.INT4}
    return codes[form.name].table(device)
