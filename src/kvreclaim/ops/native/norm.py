"""Root-mean-square norms in one call instead of eight (csrc/include/kvreclaim/norm.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.ops.extension import KERNELS, unavailable_reason

DTYPES = (torch.float32, torch.bfloat16)


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
