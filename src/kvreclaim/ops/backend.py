"""Which kernels touch the KV cache: a back-end is a module with these functions."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvreclaim.checks import check_choice
from kvreclaim.config import KERNELS
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.kv_cache import KVCache, LayerCache, PagedTokens
from kvreclaim.ops.rope import RopeLayout

BACKENDS = {
    "native": "kvreclaim.ops.native",
    "triton": "kvreclaim.ops.triton",
    "reference": "kvreclaim.ops.reference",
}


class Backend(Protocol):
    """The ops. ops/reference/ documents each one and is the oracle of all other back-ends.

    A cache belongs to the back-end that allocated it: how a block lies in memory is its own affair.
    """

    NAME: str
    STACKS_LAYERS: bool
    """Whether scores and gather_tokens take several layers at once (PagedTokens), which saves launches."""

    def allocate(
        self,
        layers: tuple[LayerFacts, ...],
        num_blocks: int,
        block_size: int,
        *,
        like: Tensor,
        kv_format: KVFormat | None = None,
    ) -> KVCache: ...

    def plain_view(self, cache: KVCache, form: KVFormat, block_size: int) -> KVCache: ...

    def unsupported_reason(self, need: Need) -> str | None: ...

    def transform_rows(
        self,
        rows: Tensor,
        factor: Tensor,
        offset: Tensor | None,
        directions: Tensor | None,
        added: Tensor | None,
    ) -> Tensor:
        """Transform keys or queries; ops/key_transform.py documents it and is the default."""
        ...

    def write_kv(self, layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None: ...

    def paged_attention(self, q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor: ...

    def column_sums(self, q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor: ...

    def gather_tokens(self, tokens: PagedTokens) -> tuple[Tensor, Tensor]: ...

    def compact(self, cache: KVCache, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None: ...

    def select_top(self, scores: Tensor, places: int) -> Tensor: ...

    def select_runs(
        self, scores: Tensor, starts: np.ndarray, lengths: np.ndarray, places: np.ndarray
    ) -> Tensor: ...

    def copy_blocks(self, cache: KVCache, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks as if all at once: a block may be the source of some pairs and the target of
        another."""
        ...

    def prepare_blocks(self, cache: KVCache, block_ids: list[int]) -> None: ...

    def trig_norm_scores(
        self, tokens: PagedTokens, queries: Tensor, weights: Tensor | None, layout: RopeLayout
    ) -> Tensor: ...

    def mixture_scores(
        self, tokens: PagedTokens, centers: Tensor, variances: Tensor, scale: float, over: slice
    ) -> Tensor: ...

    def token_norms(self, tokens: PagedTokens, *, values: bool) -> Tensor: ...

    def surrogate_scores(
        self, tokens: PagedTokens, weights: Tensor, layout: RopeLayout | None, owners: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Need:
    """Requirements of a model and its limits on a back-end's kernels; dtype: of the queries."""

    layers: tuple[LayerFacts, ...]
    block_size: int
    dtype: torch.dtype
    device: torch.device
    kv_format: KVFormat


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen back-end. why_not: why a faster one does not run; None if none was expected."""

    backend: Backend
    why_not: str | None = None

    def describe(self) -> str:
        """One line for the start of a run."""
        detail = getattr(self.backend, "describe", None)
        name = detail() if detail is not None else self.backend.NAME
        return f"kernels: {name}" + (f" ({self.why_not})" if self.why_not else "")


def choose_backend(kernels: str, need: Need) -> Choice:
    """Return the named back-end, or for "auto" the fastest one that can serve the need.

    Raises: InvalidArgumentError for an unknown name, or a named back-end that cannot serve it.
    """
    check_choice("kernels", kernels, KERNELS)
    fastest = "triton" if need.device.type == "cuda" else "native"
    name = fastest if kernels == "auto" else kernels
    module = importlib.import_module(BACKENDS[name])
    problem = module.unsupported_reason(need)
    if problem is None:
        return Choice(module)
    if kernels != "auto":
        raise InvalidArgumentError(
            f"kernels is {kernels!r}, which cannot run here: {problem}; pass 'auto' or 'reference'."
        )
    return Choice(importlib.import_module(BACKENDS["reference"]), f"not {fastest}: {problem}")
