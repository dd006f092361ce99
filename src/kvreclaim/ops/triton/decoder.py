"""The parts of a decoder layer on a GPU: torch's products, and a kernel for what lies between two of them.

    norm, q k v, rotate    (write, attend: the batch's)    output, sum and norm, gate and up, gate * up, down

Eight launches and those of the batch; nine with norms of what is added to the residual, which are part of the
sums, and two more with norms of all queries and of all keys. A CUDA graph can capture them all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional

from kvreclaim.ops.layer_parts import Gate, Heads, LayerForm, Norm, is_alike
from kvreclaim.ops.packed import PackedMatrix, joined_matrices
from kvreclaim.ops.triton.decoder_kernels import gate_kernel, rms_norm_kernel, rotate_kernel
from kvreclaim.ops.triton.packed import packed_linear
from kvreclaim.ops.triton.support import DTYPES as DTYPES
from kvreclaim.ops.triton.support import is_interpreted, new_output, padded
from kvreclaim.ops.triton.support import unavailable_reason as unavailable_reason

NAME = "triton"
ROTATIONS: tuple[dict[str, bool], ...] = ({}, {"turns_neighbours": True}, {"half_angles": True})
PLAIN_ALONE = False
TILE = 1024
"""Numbers of a tile; a row of a norm is one tile, however long it is."""
INTERPRETED_TILE = 1 << 16
"""The interpreter's time is that of its operations, whatever their size."""


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels run on tensors of this device."""
    return device.type == "cuda" or is_interpreted()


def takes_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether rms_norm can run: fp32, fp16 or bf16, no gradient."""
    return (
        x.dtype is weight.dtype
        and x.dtype in DTYPES
        and runs_on(x.device)
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def has_norm_from_one() -> bool:
    return True


def takes_form(form: LayerForm) -> bool:
    """Return whether DecoderLayer computes it: two norms in one kernel differ in their weights alone."""
    return is_alike(form.before[1], form.after[0]) and is_alike(form.heads.q_norm, form.heads.k_norm)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, from_one: bool = False) -> Tensor:
    """The native rms_norm, rounded once: x [..., D] in any strides, weight [D] -> like x, contiguous."""
    out = new_output(x, *x.shape)
    _norm(x.contiguous(), Norm(weight, eps, from_one), out)
    return out.to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, norm: Norm | None, after: Norm | None = None, *, wide: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x, under the norm `after`, and residual [T, M] contiguous -> their sum, and its norm, or the sum twice.
    Mutates `wide` alone, which becomes the norm in fp32, rounded as that is."""
    total = new_output(x, *x.shape)
    out = total if norm is None else new_output(x, *x.shape)
    _norm(x, norm, out, after, (residual, total), wide)
    total = total.to(x.dtype)
    return total, total if norm is None else out.to(x.dtype)


def _norm(
    x: Tensor,
    norm: Norm | None,
    out: Tensor,
    after: Norm | None = None,
    sums: tuple[Tensor, Tensor] | None = None,
    wide: Tensor | None = None,
) -> None:
    """out [.., M]: the norm of rows of x, as rms_norm_kernel has it. sums: a residual, and its sum with x."""
    like = norm or after
    assert like is not None or sums is not None
    width = x.shape[-1]
    block = padded(width)
    count, rows = x.numel() // width, _rows(block)
    rms_norm_kernel[(triton.cdiv(count, rows),)](
        x,
        x if sums is None else sums[0],
        x if after is None else after.weight,
        x if norm is None else norm.weight,
        out,
        out if sums is None else sums[1],
        out if wide is None else wide,
        count,
        0.0 if like is None else like.eps,
        M=width,
        STRIDE=out.stride(-2) if out.dim() > 1 else width,
        FROM_ONE=like is not None and like.from_one,
        HAS_RESIDUAL=sums is not None,
        HAS_AFTER=after is not None,
        HAS_NORM=norm is not None,
        HAS_WIDE=wide is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )


def _rows(block: int) -> int:
    """Rows of a tile with so many columns, a power of two."""
    return max(1, (INTERPRETED_TILE if is_interpreted() else TILE) // block)


def rotate(rows: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> Tensor:
    """ops.native.decoder.rotate: queries and keys of rows [T, (H + 2 K) D] contiguous, in place.

    cos, sin: [T, R], or [T, R / 2] of half angles
    Returns: the rows; in the interpreter a copy of those of 16 bits (see new_output).
    """
    out = rows.float() if is_interpreted() else rows
    turned = cos.shape[1] * (2 if heads.half_angles else 1)
    norm, k_norm = heads.q_norm, heads.k_norm
    if norm is not None and k_norm is not None and norm.weight.shape[0] != heads.dim:
        for each, part in zip((norm, k_norm), out.split(_widths(heads), 1), strict=False):
            _norm(part, each, part)
        norm = k_norm = None
    block = padded(turned // 2)
    size = _rows(block)
    rotate_kernel[(triton.cdiv(rows.shape[0] * (heads.count + heads.kv_count), size),)](
        out,
        cos.contiguous(),
        sin.contiguous(),
        out if norm is None else norm.weight,
        out if k_norm is None else k_norm.weight,
        rows.shape[0],
        0.0 if norm is None else norm.eps,
        HEADS=heads.count,
        KV_HEADS=heads.kv_count,
        D=heads.dim,
        R=turned,
        NEIGHBOURS=heads.turns_neighbours,
        HALF_ANGLES=heads.half_angles,
        HAS_NORMS=norm is not None,
        FROM_ONE=norm is not None and norm.from_one,
        ROWS=size,
        BLOCK=block,
        BLOCK_REST=padded(max(1, heads.dim - turned)),
        num_warps=4,
    )
    return out.to(rows.dtype)


def _widths(heads: Heads) -> list[int]:
    """Numbers of a row's queries, keys and values."""
    return [count * heads.dim for count in (heads.count, heads.kv_count, heads.kv_count)]


def gate(x: Tensor, kind: Gate = "silu") -> Tensor:
    """[T, 2 I] contiguous -> [T, I]: SiLU or GELU of the first half times the second."""
    count, width = x.shape[0], x.shape[1] // 2
    out = new_output(x, count, width)
    block = min(TILE, padded(width))
    rows = _rows(block)
    grid = (triton.cdiv(count, rows), triton.cdiv(width, block))
    gelu = kind == "gelu_tanh"
    gate_kernel[grid](x, out, count, WIDTH=width, GELU=gelu, ROWS=rows, BLOCK=block, num_warps=4)
    return out.to(x.dtype)


GATES: dict[Gate, Callable[[Tensor], Tensor]] = {"silu": gate, "gelu_tanh": partial(gate, kind="gelu_tanh")}


class Projection:
    """y = f(x) Wᵀ + bias; f: an RMS norm, or SiLU of x's first half times its second, or nothing."""

    def __init__(
        self,
        weight: Tensor | list[PackedMatrix],
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        is_gated: bool = False,
        like: Tensor | None = None,
        activations: str = "dtype",
    ) -> None:
        """weight [N, K] and bias [N], or packed matrices, as ops.native.decoder.Projection takes them."""
        self.weight = weight if isinstance(weight, Tensor) else joined_matrices(weight)
        self.bias, self.norm, self.is_gated = bias, norm, is_gated
        self.activations = activations
        like = weight if isinstance(weight, Tensor) else like
        assert like is not None
        self.dtype = like.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K | 2 K] contiguous, of the weight's dtype -> [T, N]."""
        if self.norm is not None:
            x = rms_norm(x, self.norm.weight, self.norm.eps, from_one=self.norm.from_one)
        return self.product(gate(x) if self.is_gated else x)

    def product(self, x: Tensor) -> Tensor:
        """x [T, K] Wᵀ + bias."""
        if isinstance(self.weight, Tensor):
            return functional.linear(x, self.weight, self.bias)
        return packed_linear(x, self.weight, self.bias, activations=self.activations)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, N] + product(x), rounded once; a plain weight's in the residual's place."""
        if not isinstance(self.weight, Tensor):
            return packed_linear(x, self.weight, self.bias, activations=self.activations, residual=residual)
        residual.addmm_(x, self.weight.t())
        return residual if self.bias is None else residual.add_(self.bias)


class DecoderLayer:
    """A decoder layer without its attention."""

    any_angles = True

    def __init__(
        self,
        form: LayerForm,
        qkv: Projection,
        out: Projection,
        *mlp: Any,
    ) -> None:
        """mlp: Projections of gate and up, and of down; where form has no gate, a module of [1, T, M]."""
        self.form, self.qkv, self.out, self.mlp = form, qkv, out, mlp
        self.fused: Any = None
        """A model.fused_moe.FusedMoe for the module, which adds to the residual."""

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, M], cos and sin [T, R] -> [T, (H + 2 K) D]: queries and keys, rotated, and values."""
        return rotate(self.qkv(x), cos, sin, self.form.heads)

    def behind(self, attended: Tensor, x: Tensor) -> Tensor:
        """attended [T, H Dv], x [T, M] -> [T, M]: with the output projection added, and the MLP."""
        form = self.form
        fused = self.fused if self.fused is not None and self.fused.takes(x) else None
        wide = torch.empty_like(x, dtype=torch.float32) if fused is not None and fused.is_wide else None
        projected = self.out.product(attended)
        total, normed = add_rms_norm(projected, x, form.before[1], form.after[0], wide=wide)
        if fused is not None:
            added: Tensor = fused.add_to(total, normed if wide is None else wide, normed)
            return added
        if form.gate is None:
            (module,) = self.mlp
            made = module(normed[None])
            made = made[0] if isinstance(made, tuple) else made  # gpt-oss adds the router's scores
            return add_rms_norm(made[0], total, None, form.after[1])[0]
        gate_up, down = self.mlp
        gated = gate(gate_up.product(normed), form.gate)
        if form.after[1] is None:
            return down.add_to(total, gated)
        return add_rms_norm(down.product(gated), total, None, form.after[1])[0]
