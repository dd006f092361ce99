"""A back-end whose caches hold each key divided by a number for every channel of its head.

Queries are multiplied by the same numbers, so scores stay; they are powers of two, equal in both dims of a
rotary band, so all of this is exact. Who calls sees keys and queries as they are: statistics, policies and
rotations know nothing of it. Only a cache's bytes differ.

Source: SmoothAttention of arXiv 2405.04532, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.kv_cache import LayerCache, PagedTokens
from kvreclaim.ops.reference.scores import surrogate_scores
from kvreclaim.ops.rope import RopeLayout


def with_key_scales(facts: ModelFacts, scales: tuple[Tensor, ...]) -> ModelFacts:
    """Facts of which caches are allocated whose keys are divided by scales [K, D], of each layer."""
    pairs = zip(facts.layers, scales, strict=True)
    layers = [
        replace(layer, softmax=replace(layer.softmax, key_scale=own.to(facts.device, facts.dtype)))
        for layer, own in pairs
    ]
    return replace(facts, layers=tuple(layers))


@dataclass(frozen=True, slots=True)
class ScaledKeys:
    """ops.backend.Backend over another one; every layer of its caches has a key_scale."""

    backend: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)  # what touches no key and no query

    def describe(self) -> str:
        """One line for the start of a run."""
        detail: Callable[[], str] | None = getattr(self.backend, "describe", None)
        return f"{self.backend.NAME if detail is None else detail()}, keys scaled by channel"

    def write_kv(self, layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        self.backend.write_kv(layer, k / _scale(layer), v, slot_mapping)

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
        return k.mul_(_of_tokens(tokens)), v

    def trig_norm_scores(
        self, tokens: PagedTokens, queries: Tensor, weights: Tensor | None, layout: RopeLayout
    ) -> Tensor:
        scale = _of_queries(tokens, len(queries))
        if weights is not None:
            weights = weights * scale[:, layout.bands[0]]
        found: Tensor = self.backend.trig_norm_scores(tokens, queries * scale[:, None], weights, layout)
        return found

    def mixture_scores(
        self, tokens: PagedTokens, centers: Tensor, variances: Tensor, scale: float, over: slice
    ) -> Tensor:
        own = _of_queries(tokens, len(centers))[:, None]
        centers, variances = centers * own[:, None], variances * own.square()
        found: Tensor = self.backend.mixture_scores(tokens, centers, variances, scale, over)
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


def scaled(backend: Backend) -> Backend:
    """The back-end for caches of with_key_scales."""
    made: Any = ScaledKeys(backend)
    return made


def _scale(layer: LayerCache) -> Tensor:
    found = layer.softmax.key_scale
    assert found is not None, f"layer {layer.index} has no key_scale"
    return found


def _by_query_head(layer: LayerCache, num_heads: int) -> Tensor:
    """[H, D] of a layer of a model."""
    return layer.cached("query scale", partial(_repeated, num_heads=num_heads))


def _repeated(layer: LayerCache, num_heads: int) -> Tensor:
    scale = _scale(layer)
    return scale.repeat_interleave(num_heads // len(scale), 0)


def _queries(q: Tensor, layer: LayerCache, batch: AttentionBatch | None = None) -> Tensor:
    """q [T, H, D] as they meet the cache's keys; over cells each sequence is of one KV head, a layer's heads
    in turn. batch: None if each sequence has one query"""
    if not _is_of_cells(layer):
        return q * _by_query_head(layer, q.shape[1])
    scale = _scale(layer)
    num_sequences = len(q) if batch is None else len(batch.lengths)
    own = scale.repeat(num_sequences // len(scale), 1)
    if batch is not None and batch.arrays.max_query_len > 1:
        own = own.repeat_interleave(torch.from_numpy(batch.query_lens).to(own.device), 0)
    return q * own[:, None]


def _is_of_cells(layer: LayerCache) -> bool:
    return len(_scale(layer)) != layer.cache.num_kv_heads


def _of_queries(tokens: PagedTokens, num_heads: int) -> Tensor:
    """[H, D] fp32 for statistics of query heads."""
    scale = _scale(tokens.layer)
    if _is_of_cells(tokens.layer):
        scale = scale[_heads(tokens)[:1]]
    return scale.float().repeat_interleave(num_heads // len(scale), 0)


def _of_tokens(tokens: PagedTokens) -> Tensor:
    """[K, 1 | T, D]"""
    scale = _scale(tokens.layer)
    if not _is_of_cells(tokens.layer):
        return scale[:, None]
    own = scale[_heads(tokens)]
    return own.repeat_interleave(tokens.cache.block_size, 0)[None, : tokens.num_tokens]


def _heads(tokens: PagedTokens) -> Tensor:
    assert tokens.heads is not None, "cells may hold any head's keys; say whose"
    return tokens.heads
