"""A back-end with caches of transformed keys: less a centre, divided by a scale per channel of the KV head,
and stretched along a few directions (ops/key_transform.py).

    stored = B (key - center),   q . key = (B^-T q) . stored + q . center

The last term is the same for all keys that a query meets, so softmax does not see it. Where softmax is not
alone (sinks, soft-capping), the center must be zero. Callers pass and get keys and queries as the model has
them; only the bytes of a cache differ.

Sources: SmoothAttention of arXiv 2405.04532, section 4.2 (scales).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops import scoring
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.key_transform import KeyTransform
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
        return f"{self.backend.NAME if detail is None else detail()}, keys centred and scaled"

    def write_kv(self, layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        stored = self.backend.transform_rows(k, *_transform(layer).of_keys)
        self.backend.write_kv(layer, stored, v, slot_mapping)

    def paged_attention(self, q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
        found: Tensor = self.backend.paged_attention(self._queries(q, layer, batch), layer, batch)
        return found

    def decode_attention(self, q: Tensor, layer: LayerCache, tables: Any) -> Tensor:
        found: Tensor = self.backend.decode_attention(self._queries(q, layer, None), layer, tables)
        return found

    def column_sums(self, q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
        found: Tensor = self.backend.column_sums(self._queries(q, layer, batch), layer, batch)
        return found

    def _queries(self, q: Tensor, layer: LayerCache, batch: AttentionBatch | None) -> Tensor:
        """q [T, H, D] as they meet the cache's keys; over cells each sequence is of one KV head, a layer's
        heads in turn. batch: None if each sequence has one query"""
        own, rows = _transform(layer), q
        heads = len(own.scale)
        if heads != layer.cache.num_kv_heads:
            if batch is None or batch.arrays.max_query_len == 1:
                rows = q.reshape(-1, heads * q.shape[1], q.shape[2])
            else:
                owners = np.repeat(np.arange(len(batch.query_lens)) % heads, batch.query_lens)
                own, rows = own.rows(torch.from_numpy(owners).to(q.device)), q.reshape(1, -1, q.shape[2])
        found: Tensor = self.backend.transform_rows(rows, *own.of_queries)
        return found.view(q.shape)

    def gather_tokens(self, tokens: PagedTokens) -> tuple[Tensor, Tensor]:
        k, v = self.backend.gather_tokens(tokens)
        own, size = _transform(tokens.layer), tokens.cache.block_size
        if tokens.heads is None:
            return own.restored(k, self.backend.transform_rows), v
        cells = torch.nn.functional.pad(k[0], (0, 0, 0, -tokens.num_tokens % size)).unflatten(0, (-1, size))
        keys = own.rows(tokens.heads[: len(cells)]).restored(cells, self.backend.transform_rows)
        return keys.flatten(0, 1)[None, : tokens.num_tokens], v

    def trig_norm_scores(
        self, tokens: PagedTokens, queries: Tensor, weights: Tensor | None, layout: RopeLayout
    ) -> Tensor:
        return scoring.trig_norm_scores(self.gather_tokens(tokens)[0], queries, weights, layout)

    def mixture_scores(
        self, tokens: PagedTokens, centers: Tensor, variances: Tensor, scale: float, over: slice
    ) -> Tensor:
        return scoring.mixture_scores(self.gather_tokens(tokens)[0], centers, variances, scale, over)

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
