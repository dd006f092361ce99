"""One layer of one live sequence as a policy reads it: scored where it lies, or copied out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops import scoring
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.moving import to_device
from kvreclaim.ops.rope import RopeLayout


class KeySource(ABC):
    """T keys and values of one layer in token order. Nothing here changes them."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(K, T)."""

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def tensors(self) -> tuple[Tensor, Tensor]:
        """keys [K, T, D] rotated and values [K, T, Dv]; from a paged source a copy, made anew each time."""

    @abstractmethod
    def trig_norm_scores(self, queries: Tensor, weights: Tensor | None, layout: RopeLayout) -> Tensor:
        """ops.scoring.trig_norm_scores: [H, T]."""

    @abstractmethod
    def mixture_scores(self, centers: Tensor, variances: Tensor, scale: float, over: slice) -> Tensor:
        """ops.scoring.mixture_scores: [K, T] fp32."""

    @abstractmethod
    def key_norms(self) -> Tensor:
        """||k||: [K, T] fp32."""

    @abstractmethod
    def value_norms(self) -> Tensor:
        """||v||: [K, T] fp32."""

    @abstractmethod
    def surrogate_scores(self, weights: Tensor, layout: RopeLayout | None) -> Tensor:
        """ops.scoring.surrogate_scores with weights [K, P] of each head: [K, T] fp32."""


class TensorSource(KeySource):
    """Keys [K, T, D] and values [K, T, Dv] as tensors."""

    keys: Tensor
    values: Tensor

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def trig_norm_scores(self, queries: Tensor, weights: Tensor | None, layout: RopeLayout) -> Tensor:
        return scoring.trig_norm_scores(self.keys, queries, weights, layout)

    def mixture_scores(self, centers: Tensor, variances: Tensor, scale: float, over: slice) -> Tensor:
        return scoring.mixture_scores(self.keys, centers, variances, scale, over)

    def key_norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.keys, dim=-1, dtype=torch.float32)

    def value_norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.values, dim=-1, dtype=torch.float32)

    def surrogate_scores(self, weights: Tensor, layout: RopeLayout | None) -> Tensor:
        return scoring.surrogate_scores(self.keys, self.values, weights, layout)


@dataclass(frozen=True, slots=True, eq=False)
class DenseSource(TensorSource):
    """Tensors that are there already."""

    keys: Tensor
    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.keys.shape[0], self.keys.shape[1]

    @property
    def device(self) -> torch.device:
        return self.keys.device


@dataclass(frozen=True, slots=True, eq=False)
class PagedSource(KeySource):
    """Tokens in their blocks, scored by a back-end's kernels."""

    backend: Backend
    tokens: PagedTokens

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.num_heads, self.tokens.num_tokens

    @property
    def device(self) -> torch.device:
        return self.tokens.cache.device

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.backend.gather_tokens(self.tokens)

    def trig_norm_scores(self, queries: Tensor, weights: Tensor | None, layout: RopeLayout) -> Tensor:
        return self.backend.trig_norm_scores(self.tokens, queries, weights, layout)

    def mixture_scores(self, centers: Tensor, variances: Tensor, scale: float, over: slice) -> Tensor:
        return self.backend.mixture_scores(self.tokens, centers, variances, scale, over)

    def key_norms(self) -> Tensor:
        return self.backend.token_norms(self.tokens, values=False)

    def value_norms(self) -> Tensor:
        return self.backend.token_norms(self.tokens, values=True)

    def surrogate_scores(self, weights: Tensor, layout: RopeLayout | None) -> Tensor:
        return self.backend.surrogate_scores(self.tokens, weights, layout)


def column_sums(
    sources: Sequence[PagedSource], queries: Sequence[Tensor], shifts: Sequence[int]
) -> list[Tensor]:
    """Attention that each one's tokens get from its last n queries, summed over them and over the query heads
    of a KV head: [K, T] fp32 each, in one call.

    Args:
        sources: of one layer of one cache on the CPU
        queries: [H, n, D] rotated, 1 <= n <= T; the last one's key is the last token
        shifts:  logical minus physical position of the queries
    """
    layer = sources[0].tokens.layer
    keys = layer.softmax.keys
    heads = [source.tokens.heads[:1] for source in sources if source.tokens.heads is not None]
    if keys is not None and heads:  # cells: each sequence is of one KV head
        layer = replace(layer, softmax=replace(layer.softmax, keys=keys.rows(torch.cat(heads))))
    slots = tuple(
        SequenceSlots(source.tokens.block_ids.to(torch.int32).numpy(), rows.shape[1], source.shape[1], shift)
        for source, rows, shift in zip(sources, queries, shifts, strict=True)
    )
    batch = AttentionBatch(slots, torch.empty(0, dtype=torch.int64), layer.cache.block_size)
    sums = sources[0].backend.column_sums(torch.cat([rows.transpose(0, 1) for rows in queries]), layer, batch)
    return [own[:, : source.shape[1]] for own, source in zip(sums, sources, strict=True)]


def key_norms(sources: Sequence[KeySource]) -> list[Tensor]:
    """||k|| of each: [K, T] fp32, in one call where they lie in one layer of a cache."""
    joined = _joined(sources)
    return (
        [source.key_norms() for source in sources]
        if joined is None
        else joined.split(joined.source.key_norms())
    )


def value_norms(sources: Sequence[KeySource]) -> list[Tensor]:
    """||v|| of each: [K, T] fp32, in one call where they lie in one layer of a cache."""
    joined = _joined(sources)
    if joined is None:
        return [source.value_norms() for source in sources]
    return joined.split(joined.source.value_norms())


def surrogate_scores(
    sources: Sequence[KeySource], weights: Sequence[Tensor], layout: RopeLayout | None
) -> list[Tensor]:
    """Surrogate scores of each with its own weights [K, P]: [K, T] fp32, in one call where they lie in one
    layer of a cache and either share their weights or have one KV head each."""
    joined = _joined(sources)
    shared = all(rows is weights[0] for rows in weights)
    if joined is None or not (shared or sources[0].shape[0] == 1):
        return [source.surrogate_scores(rows, layout) for source, rows in zip(sources, weights, strict=True)]
    backend, tokens = joined.source.backend, joined.source.tokens
    owners = None if shared else joined.owners()
    rows = weights[0] if shared else torch.cat(list(weights))
    return joined.split(backend.surrogate_scores(tokens, rows, layout, owners))


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """Several sequences as one with a joined table, for scores that depend on one token each.

    lengths: tokens of each; blocks: of each
    """

    source: PagedSource
    lengths: list[int]
    blocks: list[int]

    def split(self, scores: Tensor) -> list[Tensor]:
        """Split scores by sequence, [K, T] each; what the last blocks hold past their ends is cut off."""
        size = self.source.tokens.cache.block_size
        parts = scores.split([blocks * size for blocks in self.blocks], dim=1)
        return [part[:, :length] for part, length in zip(parts, self.lengths, strict=True)]

    def owners(self) -> Tensor:
        """Sequence of each block, [blocks] int64, on the cache's device."""
        return to_device(np.arange(len(self.blocks)).repeat(self.blocks), self.source.device)


def _joined(sources: Sequence[KeySource]) -> _Joined | None:
    """None if they do not all lie in one layer of a cache, or there is one alone."""
    paged = [source for source in sources if isinstance(source, PagedSource)]
    places = {(id(source.backend), id(source.tokens.cache), source.tokens.layer.index) for source in paged}
    if len(paged) < len(sources) or len(places) != 1 or len(sources) == 1:
        return None
    size, lengths = paged[0].tokens.cache.block_size, [source.shape[1] for source in paged]
    ids = [source.tokens.block_ids[..., : blocks_for(source.shape[1], size)] for source in paged]
    table = torch.cat(ids, dim=-1)
    heads = [source.tokens.heads for source in paged if source.tokens.heads is not None]
    owners = torch.cat([own[: len(part)] for own, part in zip(heads, ids, strict=True)]) if heads else None
    tokens = PagedTokens(paged[0].tokens.layer, table, table.shape[-1] * size, owners)
    return _Joined(PagedSource(paged[0].backend, tokens), lengths, [own.shape[-1] for own in ids])
