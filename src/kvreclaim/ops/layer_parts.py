"""Parts of a decoder layer as its kernels take them; native/decoder.py and triton/decoder.py compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Gate = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """(up + 1) gate sigmoid(alpha gate), where gate is at most `limit` and up between -limit and limit."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: weight [D] and what is added to the mean of squares.

    from_one: it multiplies by 1 + weight
    """

    weight: Tensor
    eps: float
    from_one: bool = False


def is_alike(norm: Norm | None, other: Norm | None) -> bool:
    """Return whether two norms, if there are two, differ in their weights alone."""
    if norm is None or other is None:
        return True
    return (norm.eps, norm.from_one) == (other.eps, other.from_one)


@dataclass(frozen=True, slots=True)
class Heads:
    """Layout of a row of queries, keys and values: heads and KV heads of `dim` numbers.

    q_norm, k_norm: of each head, weight [dim], or of all heads together, weight [H dim] and [K dim]
    turns_neighbours: number 2 i of a head rotates with 2 i + 1, not i with i + R / 2
    half_angles: cos and sin have R / 2 columns, not R with each angle twice
    """

    count: int
    kv_count: int
    dim: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    turns_neighbours: bool = False
    half_angles: bool = False


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Split of a row [Q + R + dr] of multi-head latent attention into queries and a latent (ops/latent.py
    names the dims).

    nope, rotary: dn and dr; rank: R
    kv_norm: norm of the R numbers of the latent
    q_norm:  norm of the first Q numbers, the latent of the queries; None: they are the queries of all heads
    turns_neighbours: numbers 2 i and 2 i + 1 rotate together and become numbers i and i + dr / 2; otherwise
        number i rotates with i + dr / 2
    """

    nope: int
    rotary: int
    rank: int
    kv_norm: Norm
    q_norm: Norm | None = None
    turns_neighbours: bool = False


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Operations of a decoder layer around its products.

    latents: of multi-head latent attention; heads are then those of its absorbed queries
    before: norms of the inputs of attention and of the MLP
    after:  norms of their outputs, before these are added to the residual
    gate:   what multiplies the MLP's second half; None of an MLP that is a module
    """

    heads: Heads
    before: tuple[Norm | None, Norm | None]
    after: tuple[Norm | None, Norm | None] = (None, None)
    gate: Gate | None = "silu"
    latents: LatentHeads | None = None
