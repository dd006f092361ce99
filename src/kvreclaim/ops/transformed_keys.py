"""A back-end with caches that hold each key less a centre, divided by a scale, per channel of its KV head.

    stored = (key - center) / scale,   q . key = (q scale) . stored + q . center

The last term is the same for all keys that a query meets, so softmax does not see it. Where softmax is not
alone (sinks, soft-capping), the center must be zero. Callers pass and get keys and queries as the model has
them; only the bytes of a cache differ. Scales are powers of two, which multiply without rounding.

Sources: SmoothAttention of arXiv 2405.04532, section 4.2 (scales).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvreclaim.ops import scoring
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.facts import KeyTransform, ModelFacts
from kvreclaim.ops.kv_cache import LayerCache, PagedTokens
from kvreclaim.ops.reference.scores import surrogate_scores
from kvreclaim.ops.rope import RopeLayout


def with_key_transforms(facts: ModelFacts, transforms: Sequence[KeyTransform]) -> ModelFacts:
    """Facts of a model with caches of transformed keys: one transform for each layer."""
    pairs = zip(facts.layers, transforms, strict=True)
    layers = [
        replace(layer, softmax=replace(layer.softmax, keys=own.to(facts.device, facts.dtype)))
        for layer, own in pairs
    ]
    return replace(facts, layers=tuple(layers))


@dataclass(frozen=True, slots=True)
class TransformedKeys:
    """ops.backend.Backend over another one, for caches of layers with a KeyTransform."""

    backend: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)  # what touches no key and no query

    def describe(self) -> str:
        """One line for the start of a run."""
        detail: Callable[[], str] | None = getattr(self.backend, "describe", None)
        return f"{self.backend.NAME if detail is None else detail()}, keys centred and scaled by channel"

    def write_kv(self, layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        own = _transform(layer)
        self.backend.write_kv(layer, torch.addcmul(own.offset, k, own.inverse), v, slot_mapping)

    def paged_attention(self, q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
        found: Tensor = self.backend.paged_attention(_queries(q, layer, batch), layer, batch)
        return found

    def decode_attention(self, q: Tensor, layer: LayerCache, tables: Any) -> Tensor:
        found: Tensor = self.backend.decode_attention(_queries(q, layer), layer, tables)
        return found

    def column_sums(self, q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
        found: Tensor = self.backend.column_sums(_queries(q, layer, batch), layer, batch)
        return found

    def gather_tokens(self, tokens: PagedTokens) -> tuple[Tensor, Tensor]:
        k, v = self.backend.gather_tokens(tokens)
        return _of_tokens(tokens).restored(k), v

    def trig_norm_scores(
        self, tokens: PagedTokens, queries: Tensor, weights: Tensor | None, layout: RopeLayout
    ) -> Tensor:
        return scoring.trig_norm_scores(self.gather_tokens(tokens)[0], queries, weights, layout)

    def mixture_scores(
        self, tokens: PagedTokens, centers: Tensor, variances: Tensor, scale: float, over: slice
    ) -> Tensor:
        """s mu.k + s^2/2 sum v k^2 with k = scale k' + center is of the same form in k', but for a term that
        all tokens share, which its softmax does not see."""
        own = _of_queries(tokens, len(centers))
        shifts = scale * variances * own.center[:, None]
        means = (centers + shifts[:, :, None]) * own.scale[:, None, None]
        spreads = variances * own.scale.square()[:, None]
        found: Tensor = self.backend.mixture_scores(tokens, means, spreads, scale, over)
        return found

    def token_norms(self, tokens: PagedTokens, *, values: bool) -> Tensor:
        if values:
            norms: Tensor = self.backend.token_norms(tokens, values=True)
            return norms
        return torch.linalg.vector_norm(self.gather_tokens(tokens)[0], dim=-1, dtype=torch.float32)

    def surrogate_scores(
        self, tokens: PagedTokens, weights: Tensor, layout: RopeLayout | None, owners: Tensor | None = None
    ) -> Tensor:
        return surrogate_scores(tokens, weights, layout, owners, gather=self.gather_tokens)


def transformed(backend: Backend) -> Backend:
    """The back-end for caches of with_key_transforms."""
    made: Any = TransformedKeys(backend)
    return made


def _transform(layer: LayerCache) -> KeyTransform:
    found = layer.softmax.keys
    assert found is not None, f"layer {layer.index} has no transform of its keys"
    return found


def _scale_by_query_head(layer: LayerCache, num_heads: int) -> Tensor:
    """[H, D] of a layer of a model."""
    return layer.cached("query scale", partial(_repeated, num_heads=num_heads))


def _repeated(layer: LayerCache, num_heads: int) -> Tensor:
    scale = _transform(layer).scale
    return scale.repeat_interleave(num_heads // len(scale), 0)


def _queries(q: Tensor, layer: LayerCache, batch: AttentionBatch | None = None) -> Tensor:
    """q [T, H, D] as they meet the cache's keys; over cells each sequence is of one KV head, a layer's heads
    in turn. batch: None if each sequence has one query"""
    if not _is_of_cells(layer):
        return q * _scale_by_query_head(layer, q.shape[1])
    scale = _transform(layer).scale
    num_sequences = len(q) if batch is None else len(batch.lengths)
    own = scale.repeat(num_sequences // len(scale), 1)
    if batch is not None and batch.arrays.max_query_len > 1:
        own = own.repeat_interleave(torch.from_numpy(batch.query_lens).to(own.device), 0)
    return q * own[:, None]


def _is_of_cells(layer: LayerCache) -> bool:
    return len(_transform(layer).scale) != layer.cache.num_kv_heads


def _of_queries(tokens: PagedTokens, num_heads: int) -> KeyTransform:
    """[H, D] fp32 for statistics of query heads."""
    own = _transform(tokens.layer)
    if tokens.heads is not None:
        own = own.rows(tokens.heads[:1])
    heads = torch.arange(num_heads, device=own.scale.device) // (num_heads // len(own.scale))
    return own.to(own.scale.device, torch.float32).rows(heads)


def _of_tokens(tokens: PagedTokens) -> KeyTransform:
    """[K, 1 | T, D]"""
    own = _transform(tokens.layer)
    if tokens.heads is None:
        return KeyTransform(own.scale[:, None], own.center[:, None])
    heads = tokens.heads.repeat_interleave(tokens.cache.block_size)[: tokens.num_tokens]
    return KeyTransform(own.scale[heads][None], own.center[heads][None])
