"""The ops in plain PyTorch, vectorised over sequences and heads: oracle and fallback of every kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvreclaim.ops import scoring
from kvreclaim.ops.batch import AttentionBatch, AttentionGroup
from kvreclaim.ops.dense import attend_rows, probabilities
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.rope import RopeLayout

NAME = "reference"
MAX_SCORES = 1 << 26
"""Attention scores held at once (elements); longer query ranges are cut into pieces."""


def allocate(layers: tuple[LayerFacts, ...], num_blocks: int, block_size: int, *, like: Tensor) -> KVCache:
    """An all-zero row-major cache with the dtype and device of `like`."""
    return KVCache.allocate(layers, num_blocks, block_size, like=like)


def write_kv(cache: KVCache, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store new tokens' keys and values in their slots.

    Args:
        k, v:         [T, K, D], keys already rotated
        slot_mapping: [T] int64, block * S + offset, no slot twice

    Mutates the cache at these slots only.
    """
    block, offset = slot_mapping // cache.block_size, slot_mapping % cache.block_size
    cache.k[layer][block, :, offset] = k.to(cache.k.dtype)
    cache.v[layer][block, :, offset] = v.to(cache.v.dtype)


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
    """Attend each sequence's new tokens over its paged keys and values, causally.

    Args:
        q:       [T, H, D], rows in the order of batch.sequences; head h reads KV head h // (H / K)
        scale:   multiplies q.k before the softmax
        softcap: scores become softcap * tanh(score / softcap)
        window:  a key is seen while query position - key position < window (logical positions)
        sinks:   [H] logits that join the softmax's denominator and carry no value

    Returns: [T, H, Dv], dtype of q. Mutates nothing. Computes in fp32.
    A row without any visible key is zero.
    Source: arXiv 2309.06180 section 4; sinks as in GPT-OSS; soft-capping as in Gemma 2.
    """
    out = q.new_zeros((q.shape[0], q.shape[1], cache.v.shape[-1]))
    for group in batch.groups:
        k = _gather_group(cache.k[layer], group)
        v = _gather_group(cache.v[layer], group)
        mask = group.mask(layer, window)
        step = max(1, MAX_SCORES // (k.shape[0] * q.shape[1] * k.shape[2]))
        for start in range(0, group.num_queries, step):
            rows = group.rows[:, start : start + step]
            part = attend_rows(
                q[rows].float(),
                k,
                v,
                mask[:, :, start : start + step],
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )
            out[rows.reshape(-1)] = part.reshape(-1, *part.shape[2:]).to(q.dtype)
    return out


def column_sums(
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
    """How much attention each slot receives from the new tokens: the probabilities that paged_attention
    weighs the values with (the parameters are the same), summed over the queries and query heads of each
    KV head.

    Returns: [N, K, C] fp32 for the N sequences of the batch, C = the greatest seq_len; zero beyond a
    sequence's own slots. Mutates nothing. A query adds its number of heads per KV head, less what a sink
    takes; one without any visible key adds nothing.
    """
    columns = int(batch.lengths.max(initial=0))
    out = torch.zeros((len(batch.sequences), cache.num_kv_heads, columns), device=q.device)
    for group in batch.groups:
        k = _gather_group(cache.k[layer], group)
        mask = group.mask(layer, window) & group.is_query[:, None, :, None]
        step = max(1, MAX_SCORES // (k.shape[0] * q.shape[1] * k.shape[2]))
        for start in range(0, group.num_queries, step):
            rows = group.rows[:, start : start + step]
            part = mask[:, :, start : start + step]
            probs = probabilities(q[rows].float(), k, part, scale=scale, softcap=softcap, sinks=sinks)
            width = min(columns, k.shape[2])
            out[group.places, :, :width] += probs.sum(2)[..., :width]
    return out


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One whole document attends to itself, without a cache: q [T, H, D], k and v [T, K, D].

    Returns: [T, H, Dv], dtype of q; the parameters mean what they mean in paged_attention.
    """
    keys, values = k.transpose(0, 1)[None].float(), v.transpose(0, 1)[None].float()
    columns = torch.arange(q.shape[0], device=q.device)
    step = max(1, MAX_SCORES // (q.shape[0] * q.shape[1]))
    parts = []
    for rows in columns.split(step):
        mask = columns <= rows[:, None]
        if window is not None:
            mask &= rows[:, None] - columns < window
        parts.append(
            attend_rows(
                q[rows][None].float(),
                keys,
                values,
                mask[None, None],
                scale=scale,
                softcap=softcap,
                sinks=sinks,
            )[0]
        )
    return torch.cat(parts).to(q.dtype)


def _gather_group(cache: Tensor, group: AttentionGroup) -> Tensor:
    """[B, K, S, D] -> [n, K, C, D] fp32; a block of one head is one contiguous copy."""
    num_blocks, heads, size, dim = cache.shape
    flat = cache.view(num_blocks * heads, size * dim).index_select(0, group.gather_index(heads))
    return flat.view(len(group.sequences), heads, -1, dim).float()


def gather_tokens(tokens: PagedTokens) -> tuple[Tensor, Tensor]:
    """One sequence's keys [K, T, D] and values [K, T, Dv] of one layer in token order (copies)."""
    return (
        _keys(tokens),
        _values(tokens),
    )


def _keys(tokens: PagedTokens) -> Tensor:
    return gather_slots(tokens.cache.k[tokens.layer], tokens.block_ids, tokens.num_tokens)


def _values(tokens: PagedTokens) -> Tensor:
    return gather_slots(tokens.cache.v[tokens.layer], tokens.block_ids, tokens.num_tokens)


def gather_slots(x: Tensor, block_ids: Tensor, num_tokens: int) -> Tensor:
    """One sequence's keys or values of one layer in token order: a copy [K, T, D].

    Args:
        x:         [B, K, S, D] in any strides and any dtype that can be indexed
        block_ids: [blocks] int64, at least ceil(T / S)
    """
    blocks = x.index_select(0, block_ids)
    return blocks.transpose(0, 1).reshape(x.shape[1], -1, x.shape[-1])[:, :num_tokens]


def trig_norm_scores(
    tokens: PagedTokens,
    queries: Tensor,
    weights: Tensor | None,
    layout: RopeLayout,
) -> Tensor:
    """scoring.trig_norm_scores of a paged sequence's keys: [H, T] fp32."""
    keys = _keys(tokens)
    return scoring.trig_norm_scores(keys, queries, weights, layout)


def mixture_scores(
    tokens: PagedTokens,
    centers: Tensor,
    variances: Tensor,
    scale: float,
    over: slice,
) -> Tensor:
    """scoring.mixture_scores of a paged sequence's keys: [K, T] fp32."""
    keys = _keys(tokens)
    return scoring.mixture_scores(keys, centers, variances, scale, over)


def key_norms(tokens: PagedTokens) -> Tensor:
    """||k|| of a paged sequence: [K, T] fp32."""
    keys = _keys(tokens)
    return torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)


def value_norms(tokens: PagedTokens) -> Tensor:
    """||v|| of a paged sequence: [K, T] fp32."""
    values = _values(tokens)
    return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)


def compact(cache: KVCache, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Slide the kept tokens of one sequence together: the i-th kept slot goes to slot i.

    Args:
        kept:       [L | 1, K | 1, M] int64 ascending slots of the old table
        source_ids: [blocks] int64, the table before; target_ids: the table after, ceil(M / S) blocks

    Every layer is read whole before it is written, so sources and targets may overlap.
    Mutates the target blocks only; what lies past slot M in the last one is zeroed.
    """
    for layer in range(cache.k.shape[0]):
        row = kept[layer if kept.shape[0] > 1 else 0]
        for x in (cache.k[layer], cache.v[layer]):
            compact_layer(x, row, source_ids, target_ids)


def compact_layer(x: Tensor, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """compact for the keys or the values of one layer.

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


def select_top(scores: Tensor, places: int) -> Tensor:
    """The indices of the `places` highest scores of each row.

    Args:
        scores: [R, N] float; -inf is allowed, NaN is not
        places: 0 <= places <= N

    Returns: [R, places] int64 ascending; of equal scores the lowest indices win.
    """
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :places]
    return best.sort(dim=-1).values


def copy_blocks(cache: KVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks (source, target) in all layers; no block is both."""
    source, target = torch.tensor(pairs, device=cache.k.device).unbind(1)
    cache.k[:, target] = cache.k[:, source]
    cache.v[:, target] = cache.v[:, source]


def prepare_blocks(cache: KVCache, block_ids: list[int]) -> None:
    """Make freshly allocated blocks safe to attend over: zero them, so that what another request left
    there (a NaN, say) is never multiplied by a zero probability."""
    index = torch.tensor(block_ids, device=cache.k.device)
    cache.k.index_fill_(1, index, 0)
    cache.v.index_fill_(1, index, 0)
