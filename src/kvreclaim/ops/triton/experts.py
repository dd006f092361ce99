"""A mixture of experts for the tokens of a decode step: three launches, and one for its router's choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvreclaim.ops.layer_parts import ClampedGate, Gate
from kvreclaim.ops.triton.expert_kernels import expert_kernel, route_kernel
from kvreclaim.ops.triton.support import dot_precision, keeps_16_bits, new_output, padded

MOST_ROWS = 64
"""Tokens of a step on these kernels. Of more, products of sorted tokens read the weights less often."""
BLOCK_T, BLOCK_N, BLOCK_K = 16, 64, 64
_KINDS: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def route(logits: Tensor, top: int, *, sums_to_one: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] contiguous -> scores [T, top] of their dtype, in falling order; experts [T, top] int64.

    The scores are those of the softmax over all experts. sums_to_one: over the sum of the chosen ones
    """
    count, experts = logits.shape
    scores = new_output(logits, count, top)
    ids = torch.empty((count, top), dtype=torch.int64, device=logits.device)
    sizes: dict[str, int] = {"BLOCK": padded(experts), "BLOCK_TOP": padded(top)}
    route_kernel[(count,)](logits, scores, ids, E=experts, TOP=top, SUMS_TO_ONE=sums_to_one, **sizes)
    return scores.to(logits.dtype), ids


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The weights of E experts: gate and up [E, 2 I, M], down [E, M, I], and biases [E, 2 I] and [E, M].

    is_transposed:  gate and up [E, M, 2 I], down [E, I, M]
    is_interleaved: gate and up in turns, not one half each
    """

    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor] | None = None
    is_transposed: bool = False
    is_interleaved: bool = False


def apply_experts(
    x: Tensor, routed: tuple[Tensor, Tensor], weights: ExpertWeights, kind: Gate | ClampedGate
) -> Tensor:
    """x [T, M] -> [T, M], the sum of what a token's experts make of it.

    Args:
        routed:  experts [T, k], no two of a token the same, and the scores [T, k] that multiply their outputs
        weights: contiguous, of x's dtype
    """
    (ids, scores), kept = (each.contiguous() for each in routed), keeps_16_bits(x.dtype)
    count, top = ids.shape
    experts, *sizes = weights.down.shape
    width, inner = reversed(sizes) if weights.is_transposed else sizes
    clamped = kind if isinstance(kind, ClampedGate) else ClampedGate(1.0, 0.0)
    how = {
        "TOP": top,
        "IS_TRANSPOSED": weights.is_transposed,
        "IS_INTERLEAVED": weights.is_interleaved,
        "HAS_BIAS": weights.biases is not None,
        "DTYPE": _KINDS[x.dtype] if kept else tl.float32,
        "PRECISION": dot_precision(x.device),
        "BLOCK_T": BLOCK_T,
        "BLOCK_TOP": padded(top),
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
    }
    rows: Tensor = x.contiguous()
    both = (weights.gate_up, weights.down)
    first, last = weights.biases or both
    for weight, bias, size, columns in ((both[0], first, inner, width), (both[1], last, width, inner)):
        made = new_output(x, count, top, size)
        grid = (experts, triton.cdiv(size, BLOCK_N), triton.cdiv(count, BLOCK_T))
        is_first = weight is weights.gate_up
        how |= {"N": size, "K": columns, "IS_FIRST": is_first, "GELU": is_first and kind == "gelu_tanh"}
        how |= {"ALPHA": clamped.alpha, "LIMIT": clamped.limit} if is_first else {"ALPHA": 1.0, "LIMIT": 0.0}
        expert_kernel[grid](rows, ids, scores, weight, bias, made, count, **how)
        rows = made
    return rows.sum(1).to(x.dtype)
