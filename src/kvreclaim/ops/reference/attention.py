"""Attention of the reference back-end, vectorised over sequences and heads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvreclaim.ops.batch import AttentionBatch, AttentionGroup
from kvreclaim.ops.dense import attend_rows, probabilities
from kvreclaim.ops.facts import Softmax
from kvreclaim.ops.kv_cache import LayerCache
from kvreclaim.ops.reference.rows import group_rows

MAX_SCORES = 1 << 26
"""Attention scores held at once (elements); longer query ranges are cut into pieces."""


def paged_attention(q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
    """Attend each sequence's new tokens over its paged keys and values, causally.

    Args:
        q: [T, H, D], rows in the order of batch.sequences; head h reads KV head h // (H / K)

    Returns: [T, H, Dv], dtype of q. Mutates nothing. Computes in fp32.
    A row without any visible key is zero.
    Source: arXiv 2309.06180 section 4.
    """
    out = q.new_zeros((q.shape[0], q.shape[1], layer.cache.v_head_dim))
    for group in batch.groups:
        k, v = group_rows(layer, group)
        mask = group.mask(layer.index, layer.softmax.window)
        step = max(1, MAX_SCORES // (k.shape[0] * q.shape[1] * k.shape[2]))
        for start in range(0, group.num_queries, step):
            rows = group.rows[:, start : start + step]
            softmax = _own_sinks(layer.softmax, group, q.shape[1])
            part = attend_rows(q[rows].float(), k, v, mask[:, :, start : start + step], softmax)
            out[rows.reshape(-1)] = part.reshape(-1, *part.shape[2:]).to(q.dtype)
    return out


def _own_sinks(softmax: Softmax, group: AttentionGroup, num_heads: int) -> Softmax:
    """Select each sequence's sinks when KV heads are sequences: [n, H]."""
    if softmax.sinks is None or len(softmax.sinks) == num_heads:
        return softmax
    every = softmax.sinks.view(-1, num_heads)
    return replace(softmax, sinks=every[group.places % len(every)])


def column_sums(q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
    """Sum the attention that each slot receives from the new tokens: the probabilities that paged_attention
    weighs the values with, summed over the queries and query heads of each
    KV head.

    Returns: [N, K, C] fp32 for the N sequences of the batch, C = the greatest seq_len; zero beyond a
    sequence's own slots. Mutates nothing. A query adds its number of heads per KV head, less what a sink
    takes; one without any visible key adds nothing.
    """
    columns = int(batch.lengths.max(initial=0))
    out = torch.zeros((len(batch.sequences), layer.cache.num_kv_heads, columns), device=q.device)
    for group in batch.groups:
        k, _ = group_rows(layer, group)
        mask = group.mask(layer.index, layer.softmax.window) & group.is_query[:, None, :, None]
        step = max(1, MAX_SCORES // (k.shape[0] * q.shape[1] * k.shape[2]))
        for start in range(0, group.num_queries, step):
            rows = group.rows[:, start : start + step]
            part = mask[:, :, start : start + step]
            probs = probabilities(q[rows].float(), k, part, layer.softmax)
            width = min(columns, k.shape[2])
            out[group.places, :, :width] += probs.sum(2)[..., :width]
    return out


def causal_attention(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> Tensor:
    """One whole document attends to itself, without a cache: q [T, H, D], k and v [T, K, D].

    Returns: [T, H, Dv], dtype of q.
    """
    keys, values = k.transpose(0, 1)[None].float(), v.transpose(0, 1)[None].float()
    columns = torch.arange(q.shape[0], device=q.device)
    step = max(1, MAX_SCORES // (q.shape[0] * q.shape[1]))
    parts = []
    for rows in columns.split(step):
        mask = columns <= rows[:, None]
        if softmax.window is not None:
            mask &= rows[:, None] - columns < softmax.window
        if softmax.chunk is not None:
            mask &= rows[:, None] // softmax.chunk == columns // softmax.chunk
        parts.append(attend_rows(q[rows][None].float(), keys, values, mask[None, None], softmax)[0])
    return torch.cat(parts).to(q.dtype)
