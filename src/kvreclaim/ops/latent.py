"""Multi-head latent attention: one latent per token serves all heads, as their keys and as their values.

Two ways to the same numbers. Absorbed, the up-projections move into the query and the output, and attention
is that of one KV head of R + dr dims over what the cache holds. Expanded, keys and values of every head are
made of the latents, as the model does without a cache. Source: arXiv 2405.04434 section 2.1.

R: dims of the latent; dn, dr: dims of a head's key without and with rotation; dv: dims of its value
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.kv_cache import PagedTokens

PIECE = 256
"""Keys that are expanded at once."""
MAX_SCORES = 1 << 20
"""Scores held at once (elements); heads are taken in groups of as many as that allows."""
MIN_QUERIES = 34
"""Fewer gain nothing, and stay with the others of their step, who are answered by one call for all: a token
with up to 32 drafts behind it is computed as tokens alone are."""


@dataclass(frozen=True, slots=True, eq=False)
class UpProjection:
    """Matrices from a latent to a head's key, value: w_uk [H, dn, R] and w_uv [H, dv, R], in any strides."""

    w_uk: Tensor
    w_uv: Tensor

    def absorb(self, query: Tensor) -> Tensor:
        """[T, H, dn + dr] -> [T, H, R + dr]: what meets a latent and its rotary key with the same scores."""
        nope, rotary = query.split([self.w_uk.shape[1], query.shape[2] - self.w_uk.shape[1]], dim=-1)
        return torch.cat([_per_head(nope, self.w_uk), rotary], dim=-1)

    def finish(self, out: Tensor) -> Tensor:
        """[T, H, R] -> [T, H, dv]: weighted sums of latents become those of the heads' values."""
        return _per_head(out, self.w_uv.transpose(1, 2))

    def expand(self, latents: Tensor, rotary: Tensor, heads: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys [H, n, dn + dr] and values [H, n, dv] of these heads, of latents [n, R] and rotary keys
        [n, dr]."""
        nope = torch.matmul(latents, self.w_uk[heads].transpose(1, 2))
        values = torch.matmul(latents, self.w_uv[heads].transpose(1, 2))
        return torch.cat([nope, rotary.expand(len(nope), -1, -1)], dim=-1), values

    def to(self, dtype: torch.dtype) -> UpProjection:
        return UpProjection(self.w_uk.to(dtype), self.w_uv.to(dtype))

    def expands(self, num_queries: int, num_tokens: int, rotary: int) -> bool:
        """Whether the last num_queries of num_tokens cost fewer multiplications expanded than absorbed.

        Each new token is projected once either way (its key and value, or its query and output), so expanding
        pays for the tokens before them, R (dn + dv) per head, and saves (2R + dr) - (dn + dr + dv) per head
        and pair of a query and a key that it sees.
        """
        _, nope, rank = self.w_uk.shape
        value = self.w_uv.shape[1]
        earlier = num_tokens - num_queries
        pairs = num_queries * earlier + num_queries * (num_queries + 1) // 2
        saved = (2 * rank + rotary) - (nope + rotary + value)
        return num_queries >= MIN_QUERIES and earlier * rank * (nope + value) < pairs * saved


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """[T, H, a] by [H, a, b] -> [T, H, b], dtype of x. On a CPU in fp32: its 16-bit products of many small
    matrices are several times slower than the conversion."""
    rows = x.transpose(0, 1)
    if x.device.type != "cpu" or x.dtype == torch.float32:
        return torch.bmm(rows, weight).transpose(0, 1)
    return torch.bmm(rows.float(), weight.float()).transpose(0, 1).to(x.dtype)


def expanded_attention(backend: Backend, tokens: PagedTokens, query: Tensor, weights: UpProjection) -> Tensor:
    """Attend a sequence's newest tokens over its latents, causally, with keys and values made of them.

    Args:
        tokens:  all of the sequence, its newest ones included; in a latent cache
        query:   [m, H, dn + dr], the last m tokens'

    Returns: [m, H, dv], dtype of query. Mutates nothing. Softmax in fp32, running over pieces of the keys.
    Oracle: paged_attention of the absorbed queries.
    """
    dtype = torch.float32 if query.device.type == "cpu" else query.dtype
    weights = weights.to(dtype)
    sums = _RunningSoftmax(query.transpose(0, 1), weights.w_uv.shape[1], tokens.layer.softmax.scale, dtype)
    cache, num_queries = tokens.cache, len(query)
    size, rank = cache.block_size, cache.v_head_dim
    step = max(1, PIECE // size) * size
    earlier = tokens.num_tokens - num_queries
    for start in range(0, tokens.num_tokens, step):
        end = min(tokens.num_tokens, start + step)
        ids = tokens.block_ids[start // size : blocks_for(end, size)]
        keys, _ = backend.gather_tokens(PagedTokens(tokens.layer, ids, end - start))
        latents, rotary = keys[0].to(dtype).split([rank, keys.shape[-1] - rank], dim=-1)
        first = max(0, start - earlier)
        hidden = _hidden(start, end, earlier + first, num_queries - first, query.device)
        group = max(1, MAX_SCORES // ((num_queries - first) * (end - start)))
        for head in range(0, query.shape[1], group):
            heads = slice(head, head + group)
            sums.add(heads, first, *weights.expand(latents, rotary, heads), hidden)
    return sums.result().transpose(0, 1).to(query.dtype)


def _hidden(start: int, end: int, first: int, count: int, device: torch.device) -> Tensor | None:
    """[count, end - start] bool: keys that come after the query, for queries at first, first + 1, ...; None
    if there are none."""
    if end - 1 <= first:
        return None
    queries = torch.arange(first, first + count, device=device)
    return torch.arange(start, end, device=device) > queries[:, None]


class _RunningSoftmax:
    """Attention of [H, m] queries over keys that come piece by piece."""

    def __init__(self, query: Tensor, value_dim: int, scale: float, dtype: torch.dtype) -> None:
        rows = query.shape[:2]
        self.query = query.to(dtype)
        self.scale = scale
        self.best = query.new_full((*rows, 1), -torch.inf, dtype=torch.float32)
        self.total = torch.zeros_like(self.best)
        self.out = query.new_zeros((*rows, value_dim), dtype=torch.float32)

    def add(self, heads: slice, first: int, k: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        """More keys [h, n, D] and values [h, n, Dv] of these heads, for the queries from `first` on."""
        at = (heads, slice(first, None))
        scores = _product(self.query[at], k.transpose(1, 2)).mul_(self.scale)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        best = torch.maximum(self.best[at], scores.amax(-1, keepdim=True))
        decay = (self.best[at] - best).exp_()
        weights = scores.sub_(best).exp_()
        self.total[at] = self.total[at] * decay + weights.sum(-1, keepdim=True)
        self.out[at] = self.out[at].mul_(decay).add_(_product(weights.to(v.dtype), v))
        self.best[at] = best

    def result(self) -> Tensor:
        """[H, m, Dv] fp32."""
        return self.out / self.total


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product with an fp32 result."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32)
