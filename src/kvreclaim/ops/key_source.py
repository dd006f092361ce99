"""One layer of one live sequence as a policy reads it: scored where it lies, or copied out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.ops import scoring
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.kv_cache import PagedTokens
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


@dataclass(frozen=True, slots=True, eq=False)
class DenseSource(KeySource):
    """Keys [K, T, D] and values [K, T, Dv] that lie in tensors."""

    keys: Tensor
    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.keys.shape[0], self.keys.shape[1]

    @property
    def device(self) -> torch.device:
        return self.keys.device

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


@dataclass(frozen=True, slots=True, eq=False)
class PagedSource(KeySource):
    """Tokens in their blocks, scored by a back-end's kernels."""

    backend: Backend
    tokens: PagedTokens

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.cache.num_kv_heads, self.tokens.num_tokens

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
        return self.backend.key_norms(self.tokens)

    def value_norms(self) -> Tensor:
        return self.backend.value_norms(self.tokens)
