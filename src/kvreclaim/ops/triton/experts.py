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
from kvreclaim.ops.triton.packed import add_up
from kvreclaim.ops.triton.support import dot_precision, keeps_16_bits, new_output, padded

MOST_GROUPS = 64
"""Groups of a router's experts."""
MOST_ROWS = 64
"""Tokens of a step on these kernels. Of more, products of sorted tokens read the weights less often."""
BLOCK_T, BLOCK_N, BLOCK_K = 16, 64, 64
_KINDS: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class RouterChoice:
    """A router's choice of `top` experts per token: the largest of the softmax of its logits.

    sums_to_one: scores over their sum
    is_sigmoid:  scores are sigmoids; with a shift added they choose
    groups:      equal parts of the experts; top_groups of them, by the sums of their two largest, are open
    scale:       multiplies the scores
    """

    top: int
    sums_to_one: bool
    is_sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


def route(logits: Tensor, choice: RouterChoice, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [T, E] contiguous, shift [E] fp32 of sigmoids -> scores [T, top] of the logits' dtype, in
    falling order (before the shift is left out); experts [T, top] int64."""
    (count, experts), top = logits.shape, choice.top
    scores = new_output(logits, count, top)
    ids = torch.empty((count, top), dtype=torch.int64, device=logits.device)
    route_kernel[(count,)](
        logits,
        logits if shift is None else shift,
        scores,
        ids,
        E=experts,
        TOP=top,
        SUMS_TO_ONE=choice.sums_to_one,
        IS_SIGMOID=choice.is_sigmoid,
        GROUPS=choice.groups,
        TOP_GROUPS=choice.top_groups,
        SCALE=choice.scale,
        BLOCK=padded(experts),
        BLOCK_TOP=padded(top),
    )
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


def num_shared(weights: ExpertWeights, shared: tuple[Tensor, Tensor]) -> int:
    """Return the shared MLP's size in experts, gate and up [2 S I, M] and down [M, S I]; 0 if it is no
    multiple of an expert."""
    gate_up, down = weights.gate_up, shared[1]
    pieces, rest = divmod(down.shape[1], weights.down.shape[2])
    is_plain = not (weights.is_transposed or weights.is_interleaved) and weights.biases is None
    return pieces if is_plain and not rest and down.dtype is gate_up.dtype else 0


def apply_experts(
    x: Tensor,
    routed: tuple[Tensor, Tensor],
    weights: ExpertWeights,
    kind: Gate | ClampedGate,
    *,
    shared: tuple[Tensor, Tensor] | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [T, M] -> [T, M], the sum of what a token's experts make of it.

    Args:
        routed:   experts [T, k], no two of a token the same, and scores [T, k] that multiply their outputs
        weights:  contiguous, of x's dtype
        shared:   an MLP of the same gate that all tokens have, contiguous; num_shared is above 0
        residual: [T, M] contiguous, added before the sum is rounded
    """
    (ids, scores), kept = (each.contiguous() for each in routed), keeps_16_bits(x.dtype)
    count, top = ids.shape
    experts, *sizes = weights.down.shape
    width, inner = reversed(sizes) if weights.is_transposed else sizes
    pieces = 0 if shared is None else num_shared(weights, shared)
    clamped = kind if isinstance(kind, ClampedGate) else ClampedGate(1.0, 0.0)
    how = {
        "EXPERTS": experts,
        "TOP": top,
        "SHARED": pieces,
        "IS_TRANSPOSED": weights.is_transposed,
        "IS_INTERLEAVED": weights.is_interleaved,
        "HAS_BIAS": weights.biases is not None,
        "DTYPE": _KINDS[x.dtype] if kept else tl.float32,
        "PRECISION": dot_precision(x.device),
        "BLOCK_T": BLOCK_T,
        "BLOCK_TOP": padded(top + pieces),
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
    }
    rows: Tensor = x.contiguous()
    both = (weights.gate_up, weights.down)
    first, last = weights.biases or both
    for weight, more, bias, size, columns in (
        (both[0], (shared or both)[0], first, inner, width),
        (both[1], (shared or both)[1], last, width, inner),
    ):
        is_first = weight is weights.gate_up
        made = new_output(x, *((count, top + pieces) if is_first else (top + pieces, count)), size)
        grid = (experts + pieces, triton.cdiv(size, BLOCK_N), triton.cdiv(count, BLOCK_T))
        how |= {"N": size, "K": columns, "IS_FIRST": is_first, "GELU": is_first and kind == "gelu_tanh"}
        how |= {"ALPHA": clamped.alpha, "LIMIT": clamped.limit} if is_first else {"ALPHA": 1.0, "LIMIT": 0.0}
        expert_kernel[grid](rows, ids, scores, weight, more, bias, made, count, **how)
        rows = made
    out = new_output(x, count, width)
    add_up(rows, out, residual=residual)
    return out.to(x.dtype)
