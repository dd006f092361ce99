"""Linear layers for few rows, on plain and packed weights, and root-mean-square norms. Weights are read
once; the kernels are csrc/include/kvreclaim/linear.h and norm.h."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvreclaim.ops.extension import KERNELS, native, unavailable_reason
from kvreclaim.ops.packed import PackedMatrix

DTYPES = (torch.float32, torch.bfloat16)
ROWS_WITH_BF16_HARDWARE = 8
"""Most rows if torch has bf16 instructions and the kernels widen to fp32: above, arithmetic bounds."""
ROWS_WITH_PAIRS = 128
"""Rows of one pass over the weights if the kernels multiply pairs of bf16. On Zen 5 the products
of a small model take .7 to .9 of torch's time at 64 rows, .9 to 1.05 at 128."""
ROWS_WITH_MATRICES = 64
"""Rows of one pass over the weights if the kernels have matrix instructions."""
ROWS_OF_ISA = {"amx": ROWS_WITH_MATRICES, "avx512bf16": ROWS_WITH_PAIRS}
ROWS_FP32 = 32
"""Above these rows torch's fp32 product, whose library packs both factors, is the faster one."""
UNLIMITED = sys.maxsize

_leading: ContextVar[int] = ContextVar("leading", default=0)
ACTIVATIONS = ("int8", "int16", "exact")
"""Rounding of x in a product: 8 or 15 bits, a scale per 32 columns, or nothing. The kernels' order."""


@contextmanager
def exact_rows(num_leading: int = UNLIMITED) -> Iterator[None]:
    """Inside, the kernels take so many leading rows of every product, however many there are behind them, so
    that each is, to the bit, what it is alone: decode rows next to prompt rows, and rows that carry
    drafts. Without a number all rows are, and attention computes the rows of a prompt as it does those of
    decode steps. For the thread that enters it.
    """
    token = _leading.set(num_leading)
    try:
        yield
    finally:
        _leading.reset(token)


def all_rows_are_exact() -> bool:
    """Return whether exact_rows() is in force without a number."""
    return _leading.get() == UNLIMITED


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear: x [..., K], weight [N, K], bias [N] -> [..., N], dtype of x.

    Sums in fp32 and rounds once; where the CPU multiplies pairs of bf16, numbers smaller than normal ones
    count as 0. The result of each of the first own_rows() rows does not depend on the other
    rows, their number or the number of threads; for later rows, and for inputs that the kernels do not
    take (other dtypes and devices, gradients, odd strides), torch's own product runs.
    """
    num_rows = x.numel() // x.shape[-1]
    own = own_rows(num_rows, x.dtype) if _takes(x, weight, bias) else 0
    if not own:
        return functional.linear(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if own == num_rows:
        native().linear(x, weight, bias, out)
        return out
    rows, found = x.view(num_rows, -1), out.view(num_rows, -1)
    native().linear(rows[:own], weight, bias, found[:own])
    found[own:] = functional.linear(rows[own:], weight, bias)
    return out


def own_rows(num_rows: int, dtype: torch.dtype) -> int:
    """Leading rows of a product that the kernels take: all up to max_rows(), else as
    many as set by exact_rows()."""
    limit = max_rows(dtype)
    return num_rows if num_rows <= limit else min(num_rows, _leading.get() if limit else 0)


@cache
def max_rows(dtype: torch.dtype) -> int:
    """Rows of x up to which the kernels run: decided by what the CPU can do, never by a timing."""
    if dtype not in DTYPES or unavailable_reason() is not None:
        return 0
    if dtype == torch.float32:
        return ROWS_FP32
    if (isa := native().isa()) in ROWS_OF_ISA:
        return ROWS_OF_ISA[isa]
    return ROWS_WITH_BF16_HARDWARE if has_bf16_hardware() else UNLIMITED


@cache
def has_bf16_hardware() -> bool:
    """Return whether torch multiplies bf16 by instructions of this CPU (AVX512-BF16, AMX).

    Assumed True on other architectures, and if torch can't detect it.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if capabilities.get("architecture") != "x86_64":
        return True
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        x.dtype is weight.dtype
        and x.is_cpu
        and weight.is_cpu
        and (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1))
        and weight.is_contiguous()
        and (bias is None or bias.dtype is x.dtype)
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, from_one: bool = False) -> Tensor:
    """x [..., D], weight [D] -> weight * (x / sqrt(mean(x²) + eps)), like x; sums in fp32.

    Rounds to the dtype of x before and after the weight, as Llama and its relatives do. from_one: times
    1 + weight, rounded once, as Gemma and Qwen3-Next do. See takes_norm() for the inputs.
    """
    out = torch.empty_like(x)
    (KERNELS.rms_norm_from_one if from_one else KERNELS.rms_norm)(x, weight, eps, out)
    return out


def has_norm_from_one() -> bool:
    """Return whether the extension is new enough for it."""
    return hasattr(KERNELS, "rms_norm_from_one")


def takes_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether rms_norm can run: fp32 or bf16 on the CPU, x contiguous, no gradient."""
    return (
        x.dtype is weight.dtype
        and x.dtype in DTYPES
        and x.is_cpu
        and weight.is_cpu
        and x.is_contiguous()
        and unavailable_reason() is None
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def packed_linear(
    x: Tensor, matrices: Sequence[PackedMatrix], bias: Tensor | None = None, *, activations: str = "int16"
) -> Tensor:
    """x [.., K] fp32 or bf16, bias [sum of N] -> [.., sum of N], the outputs of the matrices side by side.

    activations: "int8" and "int16" round x to 8 and 15 bits, with a scale per 32 columns, and multiply
        integers, which loses 1/254 and 1/32512 of the largest of 32 columns; "exact" multiplies weights in
        fp32
    A row's result does not depend on the other rows, their number or the number of threads.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty((rows.shape[0], sum(each.out_features for each in matrices)))
    native().packed_linear(
        [each.native for each in matrices], rows, bias, out, ACTIVATIONS.index(activations)
    )
    return out.view(*x.shape[:-1], -1)


def unpack_rows(matrix: PackedMatrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [n] int64 of a matrix as numbers: [n, K] of fp32 or bf16."""
    out = torch.empty((ids.shape[0], matrix.in_features), dtype=dtype)
    native().unpack_rows(matrix.native, ids.contiguous(), out)
    return out
