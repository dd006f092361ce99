"""The parts of a decoder layer in few calls: a product with the norm or gate before it and the sum behind it
(csrc/include/kvreclaim/linear.h, norm.h, decoder.h)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from kvreclaim.ops.native.extension import native
from kvreclaim.ops.native.linear import max_rows
from kvreclaim.ops.native.norm import rms_norm


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: weight [D] and what is added to the mean of squares."""

    weight: Tensor
    eps: float


class Projection:
    """y = residual + f(x) Wᵀ + bias; f: an RMS norm, or SiLU of x's first half times its second, or nothing.

    Every result is rounded to the dtype where the single modules round. Up to max_rows(dtype) rows it is one
    call of the kernels, whose rows do not depend on each other; above, torch's product runs.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, norm: Norm | None = None, is_gated: bool = False
    ) -> None:
        """weight [N, K] contiguous and bias [N], fp32 or bf16 on the CPU; is_gated: x has 2 K numbers."""
        self.weight, self.bias = weight, bias
        self.norm, self.is_gated = norm, is_gated
        self.limit = max_rows(weight.dtype)
        weights = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        self._run = native().Projection(weight, bias, *weights, is_gated).run

    def __deepcopy__(self, memo: dict[int, Any]) -> Projection:
        weight, bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        return Projection(weight, bias, norm=copy.deepcopy(self.norm, memo), is_gated=self.is_gated)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, K | 2 K] and residual [T, N], contiguous, of the weight's dtype -> [T, N]."""
        if x.shape[0] <= self.limit:
            out = x.new_empty((x.shape[0], self.weight.shape[0]))
            self._run(x, residual, out)
            return out
        if self.norm is not None:
            x = rms_norm(x, self.norm.weight, self.norm.eps)
        elif self.is_gated:
            x = gate(x)
        out = functional.linear(x, self.weight, self.bias)
        return out if residual is None else residual + out


def gate(x: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]: SiLU of the first half times the second."""
    out = x.new_empty((x.shape[0], x.shape[1] // 2))
    native().gate_rows(x, out)
    return out


@dataclass(frozen=True, slots=True)
class Heads:
    """How a row of queries, keys and values lies: heads and KV heads of `dim` numbers; norms of each head."""

    count: int
    kv_count: int
    dim: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None


def rotate(rows: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> None:
    """Rotary embedding of a step's queries and keys in place, behind the heads' norms.

    rows [T, (H + 2 K) D] contiguous; cos, sin [T, R]: number i < R / 2 of a head turns with number i + R / 2.
    Source: RoPE, arXiv 2104.09864, in the order of GPT-NeoX.
    """
    weights = [None if norm is None else norm.weight for norm in (heads.q_norm, heads.k_norm)]
    eps = 0.0 if heads.q_norm is None else heads.q_norm.eps
    native().rotate_heads(rows, cos, sin, *weights, eps, heads.count, heads.kv_count, heads.dim)
