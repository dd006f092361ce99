"""The parts of a decoder layer on a GPU: torch's products, and a kernel for what lies between two of them.

    norm, q k v, rotate    (write, attend: the batch's)    output, sum and norm, gate and up, SiLU * up, down

Eight launches and those of the batch. A CUDA graph can capture them all.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional

from kvreclaim.ops.layer_parts import Heads, Norm
from kvreclaim.ops.packed import PackedMatrix
from kvreclaim.ops.triton.decoder_kernels import gate_kernel, rms_norm_kernel, rotate_kernel
from kvreclaim.ops.triton.packed import packed_linear
from kvreclaim.ops.triton.support import DTYPES as DTYPES
from kvreclaim.ops.triton.support import is_interpreted, new_output, padded
from kvreclaim.ops.triton.support import unavailable_reason as unavailable_reason

NAME = "triton"
TILE = 1024
"""Numbers of a tile; a row of a norm is one tile, however long it is."""
INTERPRETED_TILE = 1 << 16
"""The interpreter's time is that of its operations, whatever their size."""


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on tensors of this device."""
    return device.type == "cuda" or is_interpreted()


def takes_norm(x: Tensor, weight: Tensor) -> bool:
    """Whether rms_norm can run: fp32, fp16 or bf16, no gradient wanted."""
    return (
        x.dtype is weight.dtype
        and x.dtype in DTYPES
        and runs_on(x.device)
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def has_norm_from_one() -> bool:
    return True


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, from_one: bool = False) -> Tensor:
    """ops.native.norm.rms_norm, rounded once: x [..., D] in any strides, weight [D] -> like x, contiguous."""
    out = new_output(x, *x.shape)
    _norm(x.contiguous(), None, weight, eps, (out, out), from_one)
    return out.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """x and residual [T, M] contiguous -> their sum, and its norm. Mutates nothing."""
    total, out = (new_output(x, *x.shape) for _ in range(2))
    _norm(x, residual, norm.weight, norm.eps, (total, out), False)
    return total.to(x.dtype), out.to(x.dtype)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    outs: tuple[Tensor, Tensor],
    from_one: bool,
) -> None:
    """outs: the sum with the residual, written where there is one, and the norm."""
    width = weight.shape[0]
    block = padded(width)
    count, rows = x.numel() // width, _rows(block)
    rms_norm_kernel[(triton.cdiv(count, rows),)](
        x,
        x if residual is None else residual,
        weight,
        outs[1],
        outs[0],
        count,
        eps,
        M=width,
        FROM_ONE=from_one,
        HAS_RESIDUAL=residual is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )


def _rows(block: int) -> int:
    """Rows of a tile with so many columns, a power of two."""
    return max(1, (INTERPRETED_TILE if is_interpreted() else TILE) // block)


def rotate(rows: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> Tensor:
    """ops.native.decoder.rotate: queries and keys of rows [T, (H + 2 K) D] contiguous, in place.

    cos, sin: [T, R]. Returns: the rows; in the interpreter a copy of those of 16 bits (see new_output).
    """
    out = rows.float() if is_interpreted() else rows
    turned, norm = cos.shape[1], heads.q_norm
    block = padded(turned // 2)
    size, k_norm = _rows(block), heads.k_norm
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
        HAS_NORMS=norm is not None,
        ROWS=size,
        BLOCK=block,
        BLOCK_REST=padded(max(1, heads.dim - turned)),
        num_warps=4,
    )
    return out.to(rows.dtype)


def gate(x: Tensor) -> Tensor:
    """[T, 2 I] contiguous -> [T, I]: SiLU of the first half times the second."""
    count, width = x.shape[0], x.shape[1] // 2
    out = new_output(x, count, width)
    block = min(TILE, padded(width))
    rows = _rows(block)
    grid = (triton.cdiv(count, rows), triton.cdiv(width, block))
    gate_kernel[grid](x, out, count, WIDTH=width, ROWS=rows, BLOCK=block, num_warps=4)
    return out.to(x.dtype)


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
        self.weight, self.bias, self.norm, self.is_gated = weight, bias, norm, is_gated
        self.activations = activations
        like = weight if isinstance(weight, Tensor) else like
        assert like is not None
        self.dtype = like.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K | 2 K] contiguous, of the weight's dtype -> [T, N]."""
        if self.norm is not None:
            x = rms_norm(x, self.norm.weight, self.norm.eps)
        return self.product(gate(x) if self.is_gated else x)

    def product(self, x: Tensor) -> Tensor:
        """x [T, K] Wᵀ + bias."""
        if isinstance(self.weight, Tensor):
            return functional.linear(x, self.weight, self.bias)
        return packed_linear(x, self.weight, self.bias, activations=self.activations)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, N] += product(x): of a plain weight in one launch, which rounds the sum alone."""
        if not isinstance(self.weight, Tensor):
            return residual.add_(self.product(x))
        residual.addmm_(x, self.weight.t())
        return residual if self.bias is None else residual.add_(self.bias)


class DecoderLayer:
    """A decoder layer without its attention."""

    def __init__(
        self, heads: Heads, qkv: Projection, out: Projection, gate_up: Projection, down: Projection
    ) -> None:
        self.heads, self.qkv, self.out, self.gate_up, self.down = heads, qkv, out, gate_up, down

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, M], cos and sin [T, R] -> [T, (H + 2 K) D]: queries and keys, rotated, and values."""
        return rotate(self.qkv(x), cos, sin, self.heads)

    def behind(self, attended: Tensor, x: Tensor) -> Tensor:
        """attended [T, H Dv], x [T, M] -> [T, M]: with the output projection added, and the MLP."""
        assert self.gate_up.norm is not None
        total, normed = add_rms_norm(self.out.product(attended), x, self.gate_up.norm)
        return self.down.add_to(total, gate(self.gate_up.product(normed)))
