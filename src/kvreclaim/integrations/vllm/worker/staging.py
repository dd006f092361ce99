"""Scoring of tokens in another engine's cache: read for policies, copied for our own kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.key_source import TensorSource
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.rope import RopeLayout

BLOCK_SIZE = 64
"""Block size of the copy: a multiple of the block sizes of every back-end's kernels."""
NO_VALUES = 8
"""Dims of the copy's values, which no kernel reads."""


def staged_layer(facts: LayerFacts) -> LayerFacts:
    """Return the layer of the copy, which has keys only."""
    return LayerFacts(facts.num_heads, facts.num_kv_heads, facts.head_dim, NO_VALUES, facts.softmax)


class Stage:
    """Room for the keys of one layer of one sequence, in the order of a back-end's kernels.

    It grows to the longest sequence and is overwritten for each one. Its content is valid until the next call
    of put.
    """

    def __init__(self, backend: Backend, facts: LayerFacts, dtype: torch.dtype) -> None:
        self.backend, self.layer = backend, staged_layer(facts)
        self.dtype = dtype
        self.cache: KVCache | None = None

    def put(self, keys: Tensor) -> PagedTokens:
        """keys [K, T, D] of any float dtype."""
        num_tokens = keys.shape[1]
        num_blocks = blocks_for(num_tokens, BLOCK_SIZE)
        if self.cache is None or self.cache.num_blocks < num_blocks:
            like = torch.empty(0, dtype=self.dtype, device=keys.device)
            self.cache = self.backend.allocate((self.layer,), num_blocks, BLOCK_SIZE, like=like)
        rows = keys.transpose(0, 1).to(self.dtype)
        slots = torch.arange(num_tokens, device=keys.device)
        self.backend.write_kv(self.cache.layers[0], rows, rows[..., :NO_VALUES], slots)
        blocks = torch.arange(num_blocks, device=keys.device)
        return PagedTokens(self.cache.layers[0], blocks, num_tokens)


class CacheSource(TensorSource):
    """T tokens of one layer. Keys and values are copied out of the cache the first time that they are read.

    Args:
        shape:  (K, T)
        device: of the cache
        read:   keys (0) or values (1), [K, T, D], in token order
        stage:  for scores that are products with many queries; None: PyTorch
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        read: Callable[[int], Tensor],
        stage: Stage | None = None,
    ) -> None:
        self._shape, self._device = shape, device
        self._read, self._stage = read, stage

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def device(self) -> torch.device:
        return self._device

    @cached_property
    def keys(self) -> Tensor:  # type: ignore[override]
        return self._read(0)

    @cached_property
    def values(self) -> Tensor:  # type: ignore[override]
        return self._read(1)

    def trig_norm_scores(self, queries: Tensor, weights: Tensor | None, layout: RopeLayout) -> Tensor:
        if self._stage is None:
            return super().trig_norm_scores(queries, weights, layout)
        return self._stage.backend.trig_norm_scores(self._stage.put(self.keys), queries, weights, layout)

    def mixture_scores(self, centers: Tensor, variances: Tensor, scale: float, over: slice) -> Tensor:
        if self._stage is None:
            return super().mixture_scores(centers, variances, scale, over)
        staged = self._stage.put(self.keys)
        return self._stage.backend.mixture_scores(staged, centers, variances, scale, over)
