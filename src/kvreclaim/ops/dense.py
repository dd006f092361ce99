"""Attention of rows of queries over dense, padded keys: the arithmetic that the reference ops share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvreclaim.ops.facts import Softmax


def attend_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softmax: Softmax) -> Tensor:
    """q [n, Q, H, D], k [n, K, C, D], v [n, K, C, Dv], mask [n, 1 | K, Q, C] -> [n, Q, H, Dv], all fp32.

    The mask holds the window already. A row without any visible key is zero.
    """
    n, num_queries, num_heads, _ = q.shape
    heads = k.shape[1]
    if softmax.softcap is None and softmax.sinks is None:
        mask = _fold_mask(mask, num_queries, num_heads // heads)
        out = F.scaled_dot_product_attention(_fold(q, heads), k, v, attn_mask=mask, scale=softmax.scale)
        out = torch.where(mask.any(-1, keepdim=True), out, 0.0)
    else:
        probs = probabilities(q, k, mask, softmax)
        out = torch.matmul(probs, v)
    out = out.view(n, heads, num_heads // heads, num_queries, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(n, num_queries, num_heads, -1)


def probabilities(q: Tensor, k: Tensor, mask: Tensor, softmax: Softmax) -> Tensor:
    """[n, K, G * Q, C]: what each query head (row g * Q + query of its KV head) gives each key.

    A row sums to one less what its sink takes; without any visible key it is zero.
    """
    num_queries, heads = q.shape[1], k.shape[1]
    group = q.shape[2] // heads
    scores = torch.matmul(_fold(q, heads), k.transpose(-1, -2)) * softmax.scale
    if softmax.softcap is not None:
        scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
    scores = scores.masked_fill(~_fold_mask(mask, num_queries, group), float("-inf"))
    if softmax.sinks is None:
        return torch.softmax(scores, dim=-1).nan_to_num(0.0)
    rows = softmax.sinks.view(-1, heads, group, 1).expand(-1, -1, -1, num_queries)
    rows = rows.reshape(-1, heads, group * num_queries, 1).expand(len(q), -1, -1, -1)
    return torch.softmax(torch.cat([scores, rows], dim=-1), dim=-1)[..., :-1]


def _fold(q: Tensor, heads: int) -> Tensor:
    """[n, Q, H, D] -> [n, K, G * Q, D]: the query heads of a KV head share each key."""
    n, num_queries, num_heads, dim = q.shape
    q = q.view(n, num_queries, heads, num_heads // heads, dim).permute(0, 2, 3, 1, 4)
    return q.reshape(n, heads, -1, dim)


def _fold_mask(mask: Tensor, num_queries: int, group: int) -> Tensor:
    return mask if num_queries == 1 or group == 1 else mask.repeat(1, 1, group, 1)
