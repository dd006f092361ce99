"""Parts of a decoder layer as its kernels take them; native/decoder.py and triton/decoder.py compute them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: weight [D] and what is added to the mean of squares."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Heads:
    """How a row of queries, keys and values lies: heads and KV heads of `dim` numbers; norms of each head."""

    count: int
    kv_count: int
    dim: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
