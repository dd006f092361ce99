"""Storage of a layer in the reference: one row per slot in every plane, their meaning, writes and moves.

    plain   k [L, B, K, S, D] and v [L, B, K, S, Dv] of the format's dtype
    coded   k [.., S, D bits / 8], v [.., S, Dv bits / 8], parameters [.., S, P]; bytes (formats/codecs.py)

A latent cache stores the last D - Dv dims of a key. Triton's kernels read the same planes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.backend import Need
from kvreclaim.ops.batch import AttentionGroup
from kvreclaim.ops.facts import CacheShape, LayerFacts
from kvreclaim.ops.formats import KVFormat, plain_format
from kvreclaim.ops.formats.codecs import decode_keys, decode_values, encode
from kvreclaim.ops.kv_cache import KVCache, LayerCache, PagedTokens


def allocate(
    layers: tuple[LayerFacts, ...],
    num_blocks: int,
    block_size: int,
    *,
    like: Tensor,
    kv_format: KVFormat | None = None,
) -> KVCache:
    """An all-zero cache on the device of `like`.

    Args:
        kv_format: None: the plain format of like's dtype

    Raises: InvalidArgumentError where the format cannot hold these layers.
    """
    form = kv_format or plain_format(like.dtype)
    problem = form.unsupported_reason(layers)
    if problem is not None:
        raise InvalidArgumentError(
            f"kv_cache_dtype is {form.name!r}, which cannot be stored here: {problem}."
        )
    shape = CacheShape.of(layers, num_blocks, block_size)
    softmaxes = tuple(layer.softmax for layer in layers)
    rows = (*shape.units, block_size)
    dims = shape.k_dim, shape.v_dim
    if form.is_plain:
        plain = tuple(like.new_zeros((*rows, dim), dtype=form.dtype) for dim in dims)
        return KVCache(shape, form, plain, softmaxes)
    codes = form.keys.code_bytes(shape.k_dim), form.values.code_bytes(shape.v_dim)
    sizes = (*codes, form.slot_params(*dims))
    planes = tuple(like.new_zeros((*rows, size), dtype=torch.uint8) for size in sizes)
    return KVCache(shape, form, planes, softmaxes)


def plain_view(cache: KVCache, form: KVFormat, block_size: int) -> KVCache:
    """The bytes of a cache's codes as blocks of a plain format: of so many tokens each, with keys and values
    as large as those of the cache's own block. Parameters next to the codes stay unused."""
    shape = replace(cache.shape, block_size=block_size)
    planes = tuple(
        plane.view(form.number).view(*shape.units, block_size, dim)
        for plane, dim in zip(cache.planes, (shape.k_dim, shape.v_dim), strict=False)
    )
    return KVCache(shape, form, planes, cache.softmaxes)


def unsupported_reason(need: Need) -> str | None:
    """Nothing is too odd for the reference."""
    return None


def store_rows(cache: KVCache, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return the data of each plane for keys [..., D] and values [..., Dv]."""
    if cache.shape.latent:
        k = k[..., cache.shape.v_dim :]
    if not cache.format.is_plain:
        return encode(cache.format, k, v)
    return k.to(cache.number), v.to(cache.number)


def load_rows(cache: KVCache, rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the keys [..., D] and values [..., Dv] of rows of the planes."""
    if cache.format.is_plain:
        k, v = rows
    else:
        k_codes, v_codes, params = rows
        dims = cache.shape.k_dim, cache.shape.v_dim
        k = decode_keys(cache.format, k_codes, params, *dims)
        v = decode_values(cache.format, v_codes, params, *dims)
    return (torch.cat((v, k), -1) if cache.shape.latent else k), v


def group_rows(layer: LayerCache, group: AttentionGroup) -> tuple[Tensor, Tensor]:
    """Keys [n, K, C, D] and values [n, K, C, Dv] of a group's blocks in fp32."""
    cache = layer.cache
    index = group.gather_index(cache.num_kv_heads)
    rows = (_group_plane(plane, index, len(group.sequences)) for plane in layer.planes)
    k, v = load_rows(cache, tuple(rows))
    return k.float(), v.float()


def _group_plane(plane: Tensor, index: Tensor, num_sequences: int) -> Tensor:
    """[B, K, S, X] -> [n, K, C, X]; a block of one head is one contiguous copy."""
    num_blocks, heads, size, dim = plane.shape
    flat = plane.view(num_blocks * heads, size * dim).index_select(0, index)
    return flat.view(num_sequences, heads, -1, dim)


def gather_tokens(tokens: PagedTokens) -> tuple[Tensor, Tensor]:
    """One sequence's keys [K, T, D] and values [K, T, Dv] of one layer in token order (copies): of a plain
    format in its dtype, of codes in fp32."""
    cache = tokens.cache
    rows = (gather_slots(plane, tokens.block_ids, tokens.num_tokens) for plane in tokens.layer.planes)
    return load_rows(cache, tuple(rows))


def gather_slots(x: Tensor, block_ids: Tensor, num_tokens: int) -> Tensor:
    """One sequence's keys or values of one layer in token order: a copy [K, T, D].

    Args:
        x:         [B, K, S, D] in any strides and any dtype that can be indexed
        block_ids: [blocks] int64, at least ceil(T / S); of n stacked layers [n, blocks], for [n * K, T, D]
    """
    count, (_, heads, size, dim) = block_ids.shape[:-1].numel(), x.shape
    blocks = x.index_select(0, block_ids.flatten()).view(count, block_ids.shape[-1], heads, size, dim)
    return blocks.transpose(1, 2).reshape(count * heads, block_ids.shape[-1] * size, dim)[:, :num_tokens]


def write_kv(layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store new tokens' keys and values in their slots.

    Args:
        k, v:         [T, K, D], keys already rotated
        slot_mapping: [T] int64, block * S + offset, no slot twice

    Mutates the cache at these slots only.
    """
    cache = layer.cache
    block, offset = slot_mapping // cache.block_size, slot_mapping % cache.block_size
    for plane, rows in zip(layer.planes, store_rows(cache, k, v), strict=True):
        plane[block, :, offset] = rows


def compact(cache: KVCache, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Slide the kept tokens of one sequence together: the i-th kept slot goes to slot i.

    Args:
        kept:       [L | 1, K | 1, M] int64 ascending slots of the old table
        source_ids: [blocks] int64, the table before; target_ids: the table after, ceil(M / S) blocks

    Every layer is read whole before it is written, so sources and targets may overlap.
    Mutates the target blocks only; what lies past slot M in the last one becomes zero bytes.
    """
    for layer in cache.layers:
        row = kept[layer.index if kept.shape[0] > 1 else 0]
        for plane in layer.planes:
            compact_layer(plane, row, source_ids, target_ids)


def compact_layer(x: Tensor, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """compact for one plane of one layer.

    Args:
        x:    [B, K, S, D] in any strides and any dtype that can be indexed; mutated
        kept: [K | 1, M] int64 ascending
    """
    heads, size, dim = x.shape[1:]
    slots = kept.expand(heads, -1)
    head = torch.arange(heads, device=kept.device)[:, None]
    survivors = x[source_ids[slots // size], head, slots % size]
    padded = F.pad(survivors, (0, 0, 0, target_ids.numel() * size - kept.shape[-1]))
    x[target_ids] = padded.view(heads, -1, size, dim).transpose(0, 1)


def copy_blocks(cache: KVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks (source, target) in all layers, as if at once: every source is read as it was before
    the call, also if it is a target. No target twice."""
    source, target = torch.tensor(pairs, device=cache.device).unbind(1)
    for plane in cache.planes:
        plane[:, target] = plane[:, source]


def prepare_blocks(cache: KVCache, block_ids: list[int]) -> None:
    """Make freshly allocated blocks safe to attend over: zero them, so that what another request left
    there (a NaN, say) is never multiplied by a zero probability."""
    index = torch.tensor(block_ids, device=cache.device)
    for plane in cache.planes:
        plane.index_fill_(1, index, 0)
