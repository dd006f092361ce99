"""The parts of a decoder layer in few calls: a product with the norm or gate before it and the sum behind it
(csrc/include/kvreclaim/linear.h, norm.h, decoder.h)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvreclaim.ops.extension import KERNELS, native
from kvreclaim.ops.extension import unavailable_reason as unavailable_reason
from kvreclaim.ops.layer_parts import Gate, Heads, LayerForm, Norm, is_alike
from kvreclaim.ops.native.linear import ACTIVATIONS, max_rows, own_rows, rms_norm
from kvreclaim.ops.native.linear import DTYPES as DTYPES
from kvreclaim.ops.native.linear import has_norm_from_one as has_norm_from_one
from kvreclaim.ops.native.linear import takes_norm as takes_norm
from kvreclaim.ops.packed import PackedMatrix

NAME = "native"
ROTATIONS: tuple[dict[str, bool], ...] = ({},)
"""The rotations that the kernels have, as fields of Heads."""
PLAIN_ALONE = True
"""Whether layers with norms that multiply by 1 + weight, or with an MLP that is a module, are never taken."""
MOST_ROWS = 64
"""Rows of a layer in two calls: the room for what lies between their products is kept."""


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels run on tensors of this device."""
    return device.type == "cpu"


def takes_form(form: LayerForm) -> bool:
    """Return whether DecoderLayer computes it: norms are before the products alone, and of single heads."""
    own = (form.heads.q_norm, form.heads.k_norm)
    is_single = all(norm is None or norm.weight.shape[0] == form.heads.dim for norm in own)
    return form.gate is not None and form.after == (None, None) and is_single and is_alike(*own)


class Projection:
    """y = residual + f(x) Wᵀ + bias; f: an RMS norm, or SiLU of x's first half times its second, or nothing.

    Every result is rounded to the dtype where the single modules round. The own_rows() of a step, and with
    packed weights all, are one call of kernels with independent rows; for the rest
    torch's product runs.
    """

    def __init__(
        self,
        weight: Tensor | list[PackedMatrix],
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        is_gated: bool = False,
        like: Tensor | None = None,
        activations: str = "int16",
    ) -> None:
        """weight [N, K] contiguous and bias [N], fp32 or bf16 on the CPU; is_gated: x has 2 K numbers.

        Packed matrices have their outputs side by side; like: a tensor of x's dtype, with them alone.
        activations: as of packed_linear
        """
        self.weight, self.bias = weight, bias
        self.norm, self.is_gated, self.is_plain = norm, is_gated, isinstance(weight, Tensor)
        self.activations = activations
        if isinstance(weight, Tensor):
            self.dtype, self.out_features = weight.dtype, weight.shape[0]
            what: Any = weight
            like = weight
        else:
            assert like is not None
            self.dtype = like.dtype
            self.out_features = sum(each.out_features for each in weight)
            what = [each.native for each in weight]
        weights = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        kind = ACTIVATIONS.index(activations)
        self.native = native().Projection(what, like, bias, *weights, is_gated, kind)
        self._run = self.native.run

    def __deepcopy__(self, memo: dict[int, Any]) -> Projection:
        weight, bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        how: dict[str, Any] = {"is_gated": self.is_gated, "activations": self.activations}
        like = torch.empty(0, dtype=self.dtype)
        return Projection(weight, bias, norm=copy.deepcopy(self.norm, memo), like=like, **how)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, K | 2 K] and residual [T, N], contiguous, of the weight's dtype -> [T, N]."""
        num_rows = x.shape[0]
        own = self.own_rows(num_rows)
        if not own:
            found = self._by_torch(x)
            return found if residual is None else residual + found
        out = x.new_empty((num_rows, self.out_features))
        self._run(x[:own], None if residual is None else residual[:own], out[:own])
        if own < num_rows:
            found = self._by_torch(x[own:])
            out[own:] = found if residual is None else residual[own:] + found
        return out

    def own_rows(self, num_rows: int) -> int:
        """Leading rows of so many that the kernels take."""
        if self.is_plain and num_rows > max_rows(self.dtype):
            return own_rows(num_rows, self.dtype)
        return num_rows

    def _by_torch(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Tensor), "packed weights are the kernels'"
        if self.norm is not None:
            x = rms_norm(x, self.norm.weight, self.norm.eps)
        elif self.is_gated:
            x = gate(x)
        return functional.linear(x, self.weight, self.bias)


def gate(x: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]: SiLU of the first half times the second."""
    out = x.new_empty((x.shape[0], x.shape[1] // 2))
    native().gate_rows(x, out)
    return out


GATES: dict[Gate, Callable[[Tensor], Tensor]] = {"silu": gate}


def _native(heads: Heads) -> tuple[Any, ...]:
    """Weights of both norms and what both add, and the sizes, as the kernels take them."""
    q_weight, eps = (None, 0.0) if heads.q_norm is None else (heads.q_norm.weight, heads.q_norm.eps)
    k_weight = None if heads.k_norm is None else heads.k_norm.weight
    return q_weight, k_weight, eps, heads.count, heads.kv_count, heads.dim


def rotate(rows: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> None:
    """Rotary embedding of a step's queries and keys in place, behind the heads' norms.

    rows [T, (H + 2 K) D] contiguous; cos, sin [T, R]: number i < R / 2 of a head turns with number i + R / 2.
    Source: RoPE, arXiv 2104.09864, in the order of GPT-NeoX.
    """
    KERNELS.rotate_heads(rows, cos, sin, *_native(heads))


class DecoderLayer:
    """A decoder layer without its attention: for up to MOST_ROWS rows one call before it and one behind it,
    for more a call for each part."""

    any_angles = False
    """Whether cos and sin may have another dtype than x."""

    def __init__(
        self, form: LayerForm, qkv: Projection, out: Projection, gate_up: Projection, down: Projection
    ) -> None:
        self.form, self.qkv, self.out, self.gate_up, self.down = form, qkv, out, gate_up, down
        parts = (each.native for each in (qkv, out, gate_up, down))
        self._native = native().DecoderLayer(*parts, *_native(form.heads))

    def __deepcopy__(self, memo: dict[int, Any]) -> DecoderLayer:
        parts = [copy.deepcopy(part, memo) for part in (self.qkv, self.out, self.gate_up, self.down)]
        return DecoderLayer(copy.deepcopy(self.form, memo), *parts)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, M], cos and sin [T, R] -> [T, (H + 2 K) D]: queries and keys, rotated, and values."""
        if not self._is_one_call(x.shape[0]):
            rows = self.qkv(x)
            rotate(rows, cos, sin, self.form.heads)
            return rows
        rows = x.new_empty((x.shape[0], self.qkv.out_features))
        self._native.before(x, cos, sin, rows)
        return rows

    def behind(self, attended: Tensor, x: Tensor) -> Tensor:
        """attended [T, H Dv], x [T, M] -> [T, M]: with the output projection added, and the MLP."""
        if not self._is_one_call(x.shape[0]):
            x = self.out(attended, x)
            return self.down(self.gate_up(x), x)
        out = torch.empty_like(x)
        self._native.behind(attended, x, out)
        return out

    def _is_one_call(self, num_rows: int) -> bool:
        return num_rows <= MOST_ROWS and self.qkv.own_rows(num_rows) == num_rows
