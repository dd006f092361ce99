"""The paged cache of the native back-end: allocation, writes, moves, attention; ops/reference/ documents
each function."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.backend import Need
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.cells import CellBatch
from kvreclaim.ops.extension import KERNELS, native, unavailable_reason
from kvreclaim.ops.facts import CacheShape, LayerFacts
from kvreclaim.ops.formats import KVFormat, plain_format
from kvreclaim.ops.formats.hadamard import sign_tensor
from kvreclaim.ops.kv_cache import KVCache, LayerCache, PagedTokens
from kvreclaim.ops.native.decoder import all_rows_are_exact

LAYOUTS = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4", "turboquant4", "int8+int4")
"""KV formats in the order of csrc's kCacheFormats."""
EXACT_QUERIES = 33
"""Rows of a sequence up to which each is, to the bit, what it would be alone, as a decode step's only row: a
token and the drafts behind it. The kernels' bound. More are a prefill, which is computed in another order."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = 16
"""Tokens that the kernels take at once; a block has to be a multiple."""
SPARE_BYTES = 64
"""Behind the units of a coded format: the last vector of a row may reach past them."""


def transform_rows(
    rows: Tensor, factor: Tensor, offset: Tensor | None, directions: Tensor | None, added: Tensor | None
) -> Tensor:
    """key_transform.transform_rows in one pass, rounded once; rows [T, H, D] with any strides."""
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    KERNELS.transform_rows(rows, factor, offset, directions, added, out)
    return out


def cache_view(cache: KVCache) -> Any:
    """Return the extension's view of a cache, made once."""
    return cache.cached("native", make_cache)


def make_cache(cache: KVCache) -> Any:
    """Make the extension's view of a cache, for `cached`."""
    shape, form = cache.shape, cache.format
    dims = (*shape.units, shape.block_size, shape.k_dim, shape.v_dim)
    signs = tuple(sign_tensor(dim, cache.device) for dim in (shape.k_dim, shape.v_dim))
    return native().Cache(
        LAYOUTS.index(form.name), dims, shape.latent, list(cache.planes), signs if form.is_rotated else None
    )


def make_layer(layer: LayerCache) -> tuple[tuple[Any, int], tuple[Any, ...]]:
    """Make a layer's kernel arguments, for `cached`: its cache, its place there and its softmax."""
    rule = layer.softmax
    return (cache_view(layer.cache), layer.index), (
        rule.scale,
        rule.softcap or 0.0,
        rule.window or 0,
        rule.sinks,
    )


def make_batch(batch: AttentionBatch) -> Any:
    """Make the extension's view of a step's sequences, for `cached`."""
    if isinstance(batch, CellBatch):
        given = batch.given
        return native().Batch.from_arrays(
            batch.block_size, given.block_table, given.query_starts, given.seq_lens, given.shifts
        )
    return _view(batch, batch.sequences)


def make_runs(batch: AttentionBatch) -> Any:
    """Make a view with at most EXACT_QUERIES rows per sequence, for `cached`. Cells of single heads stay
    whole: they are those of compressed caches."""
    if isinstance(batch, CellBatch):
        return batch.cached("native", make_batch)
    return _view(batch, batch.runs(EXACT_QUERIES))


def _view(batch: AttentionBatch, sequences: Iterable[SequenceSlots]) -> Any:
    view = native().Batch(batch.block_size)
    for seq in sequences:
        view.add(seq.block_ids, seq.query_len, seq.seq_len, seq.shift, seq.slot_positions)
    return view


PAGE, HUGE_PAGE = 2**12, 2**21


def unsupported_reason(need: Need) -> str | None:
    """Why the native kernels cannot serve this model; None if they can."""
    first = need.layers[0]
    dims = (first.key_dims, first.v_head_dim)
    if need.device.type != "cpu":
        return f"the native kernels run on CPUs, not on {need.device.type}"
    if need.dtype not in DTYPES:
        return f"dtype {need.dtype} is neither float32, bfloat16 nor float16"
    if need.kv_format.name not in LAYOUTS:
        return f"the native kernels do not have the KV format {need.kv_format.name}"
    if need.block_size % CHUNK:
        return f"block size {need.block_size} is no multiple of {CHUNK}"
    if any(dim % 8 for dim in dims):
        return f"head dims {dims} are no multiples of 8"
    return unavailable_reason()


def allocate(
    layers: tuple[LayerFacts, ...],
    num_blocks: int,
    block_size: int,
    *,
    like: Tensor,
    kv_format: KVFormat | None = None,
) -> KVCache:
    """An all-zero cache; see csrc/include/kvreclaim/layout.h for the layout.

    Raises: InvalidArgumentError if unsupported_reason gives a reason.
    """
    form = kv_format or plain_format(like.dtype)
    problem = unsupported_reason(Need(layers, block_size, like.dtype, like.device, form))
    if problem is not None:
        raise InvalidArgumentError(f"kernels is 'native', which cannot run here: {problem}.")
    shape = CacheShape.of(layers, num_blocks, block_size)
    if form.is_plain:
        keys = (shape.k_dim, block_size) if form.keys.bits == 32 else (shape.k_dim // 2, block_size, 2)
        inner = (keys, (block_size, shape.v_dim))
        planes = tuple(_zeros((*shape.units, *dims), form.number) for dims in inner)
    else:
        planes = (_units(shape, form),)
    for plane in planes:
        plane[:, :1].zero_()  # by all threads: the first token waits until the system has cleared these pages
    softmaxes = tuple(layer.softmax for layer in layers)
    return KVCache(shape, form, planes, softmaxes)


def plain_view(cache: KVCache, form: KVFormat, block_size: int) -> KVCache:
    """reference.plain_view: keys and values of a head lie where the codes of a unit lie."""
    shape = replace(cache.shape, block_size=block_size)
    keys = (shape.k_dim, block_size) if form.keys.bits == 32 else (shape.k_dim // 2, block_size, 2)
    (units,) = cache.planes
    first, planes = 0, []
    for dims in (keys, (block_size, shape.v_dim)):
        size = math.prod(dims) * form.keys.bits // 8
        planes.append(units[..., first : first + size].view(form.number).unflatten(-1, dims))
        first += size
    return KVCache(shape, form, tuple(planes), cache.softmaxes)


def _units(shape: CacheShape, form: KVFormat) -> Tensor:
    """[L, B, K, unit_bytes] uint8; all zero is a cache of zeros."""
    size = form.unit_bytes(shape.k_dim, shape.v_dim, shape.block_size)
    count = shape.num_layers * shape.num_blocks * shape.num_kv_heads * size
    flat = _zeros((count + SPARE_BYTES,), torch.uint8)
    return flat[:count].view(*shape.units, size)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in huge pages where the system gives them: blocks lie at random places. Memory is taken when a
    page is first written, so a large pool costs no time at the start.

    They begin with a page, so that pieces of a page are fetched ahead as one: the CPU stops at a page's end.
    """
    size = math.prod(shape) * dtype.itemsize
    page = HUGE_PAGE if size >= HUGE_PAGE else PAGE
    flat = torch.from_numpy(np.zeros(size + page, np.uint8))
    flat = flat[-flat.data_ptr() % page :][:size]
    native().advise_huge_pages(flat.data_ptr(), size)
    return flat.view(dtype).view(shape)


def write_kv(layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """reference.write_kv; k and v with any strides, fp32, bf16 or fp16 (rounded to nearest even)."""
    place, _ = layer.cached("native", make_layer)
    KERNELS.write_kv(*place, k, v, slot_mapping)


def gather_tokens(tokens: PagedTokens) -> tuple[Tensor, Tensor]:
    """reference.gather_tokens: keys [K, T, D] and values [K, T, Dv], copies in the format's number."""
    cache, heads = tokens.cache, tokens.cache.num_kv_heads
    k = torch.empty((heads, tokens.num_tokens, cache.head_dim), dtype=cache.number)
    v = torch.empty((heads, tokens.num_tokens, cache.v_head_dim), dtype=cache.number)
    native().gather_tokens(cache_view(cache), tokens.layer.index, tokens.block_ids, k, v)
    return k, v


def prepare_blocks(cache: KVCache, block_ids: list[int]) -> None:
    """Nothing to clear: the kernels never let a slot past a sequence's length into a sum."""


def copy_blocks(cache: KVCache, pairs: list[tuple[int, int]]) -> None:
    """reference.copy_blocks: whole blocks in any format."""
    source, target = torch.tensor(pairs).unbind(1)
    for plane in cache.planes:
        plane[:, target] = plane[:, source]


def compact(cache: KVCache, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """reference.compact in place, all layers in one call.

    Args:
        kept:       [L | 1, K | 1, M] int64 slots of the old table, strictly ascending
        source_ids: [blocks] int64, the table before
        target_ids: [>= ceil(M / S)] int64, the table after, no block twice

    A target block that keeps its tokens is not touched. The order is ascending, so nothing is read after it
    was overwritten as long as a target block lies at the same or an earlier place in the old table, or in
    none; otherwise each head is gathered in scratch first. What lies past slot M in the last target is
    unspecified. Raises: ValueError, before anything moves, for slots or blocks outside their range.
    """
    native().compact(cache_view(cache), kept.contiguous(), source_ids, target_ids)


def paged_attention(q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
    """reference.paged_attention: q [T, H, D] with any strides, fp32, bf16 or fp16 -> [T, H, Dv], dtype of q.

    fp32 and bf16 caches are read as they lie; others are decoded into fp32 panels of 64 tokens in scratch of
    the thread. Where the CPU has AVX-512 VNNI, decode of int8 and int4 with 16-bit queries multiplies
    integers instead: q and the weights rounded to 16 bits, see csrc/include/kvreclaim/integer_loops.h.
    Keys are cut at fixed slots and the parts merged, so that one long sequence uses all threads and a row
    depends neither on the rest of the batch nor on the number of threads, nor, up to EXACT_QUERIES rows of a
    sequence, on other rows. Inside exact_rows() longer prompts are cut into runs of so many rows.
    """
    out = q.new_empty((q.shape[0], q.shape[1], layer.cache.shape.v_dim))
    place, softmax = layer.cached("native", make_layer)
    view = batch.cached("runs", make_runs) if all_rows_are_exact() else batch.cached("native", make_batch)
    KERNELS.paged_attention(q, out, *place, view, *softmax)
    return out


def column_sums(q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
    """reference.column_sums: q [T, H, D] with any strides, fp32, bf16 or fp16 -> [N, K, C] fp32.

    Any format of the cache: what is not read as it lies goes through fp32 panels, as in paged_attention.
    One pass over the keys for eight query rows at a time (four without AVX-512); a KV head of a sequence is
    one thread's. The result depends neither on the rest of the batch nor on the number of threads. Scratch
    per thread: eight floats per slot.
    """
    columns = int(batch.lengths.max(initial=0))
    sums = torch.empty((len(batch.sequences), layer.cache.num_kv_heads, columns), dtype=torch.float32)
    place, softmax = layer.cached("native", make_layer)
    native().column_sums(q, sums, *place, batch.cached("native", make_batch), *softmax)
    return sums
