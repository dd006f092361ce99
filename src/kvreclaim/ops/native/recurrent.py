"""Tokens of several sequences through a recurrent layer, from slot to slot
(csrc/include/kvreclaim/recurrent.h): the convolution, the state and the gated norm in one call.

Tokens are rows [T, R], described by PackedRuns. Tokens before the first kept state of
a sequence are prompt. No slot may be read and written, or be written twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvreclaim.ops.extension import KERNELS, unavailable_reason
from kvreclaim.ops.states import PackedRuns

PIECE = 128
"""Channels that one thread convolves at a time."""


def missing_steps() -> str | None:
    """Why the steps cannot run on this installation; None if they can."""
    old = "the native extension is older than this package; reinstall"
    return unavailable_reason() or (None if hasattr(KERNELS, "SelectiveScan") else old)


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """A causal convolution of each channel with SiLU behind it.

    weight: [C, width] fp32 or bf16; bias: [C], same dtype
    places: (place in a row, number of channels) of runs of channels, in their order
    """

    weight: Tensor
    bias: Tensor | None
    places: tuple[tuple[int, int], ...]

    def pieces(self) -> Tensor:
        """[P, 3]: place in a row, first channel, number of channels."""
        found, channel = list[tuple[int, int, int]](), 0
        for place, count in self.places:
            found += [(place + i, channel + i, min(PIECE, count - i)) for i in range(0, count, PIECE)]
            channel += count
        return torch.tensor(found, dtype=torch.int64).view(-1, 3)


class DeltaStep:
    """Gated delta rule: S' = e^g S + k (β (v - e^g Sᵀ k))ᵀ, y = S'ᵀ q, normed by head, times SiLU(z).

    q and k have length 1, q is scaled by Dk^-1/2; β = sigmoid(b), g = decay · softplus(a + dt_bias).
    Source: arXiv 2412.06464. Oracle: transformers'
    torch_recurrent_gated_delta_rule, of prompts torch_chunk_gated_delta_rule.
    """

    def __init__(
        self,
        convolution: Convolution,
        sizes: tuple[int, int, int, int],
        places: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        eps: float,
    ) -> None:
        """sizes: H value heads, key heads, Dk, Dv; places [3, H] int64: of each head's z, b and a in a row;
        decay, dt_bias [H] fp32; norm [Dv] of the convolution's dtype. Channels: all q, all k, all v."""
        self.width = sizes[0] * sizes[3]
        weight, bias = convolution.weight, convolution.bias
        self._run = KERNELS.DeltaStep(
            weight, bias, convolution.pieces(), sizes, places, decay, dt_bias, norm, eps
        ).run

    def __call__(self, rows: Tensor, runs: PackedRuns, conv: Tensor, states: Tensor) -> Tensor:
        """conv [slots, C, kept], states [slots, H, Dk, Dv] fp32 -> [T, H Dv]."""
        return _run(self._run, self.width, rows, runs, conv, states)


class SsdStep:
    """Mamba-2: S' = e^(dt A) S + (dt x) Bᵀ, y = S' C + D x, gated by SiLU(z), normed before or behind that.

    dt = softplus(dt + dt_bias). Source: arXiv 2405.21060.
    Oracle: transformers' mamba2_selective_state_update, of prompts mamba2_chunk_scan.
    """

    def __init__(
        self,
        convolution: Convolution,
        sizes: tuple[int, int, int, int],
        places: tuple[int, int],
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        *,
        norm: Tensor | None = None,
        norm_groups: int = 1,
        eps: float = 0.0,
        norm_before_gate: bool = False,
        dt_limits: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        """sizes: H heads, P numbers of a head, groups, N numbers of B and C; places: of z and dt in a row;
        a, d, dt_bias [H] fp32; norm [H P] of the convolution's dtype; dt_limits: of a prompt's dt.
        Channels: x, all B, all C."""
        self.width = sizes[0] * sizes[1]
        weight, bias = convolution.weight, convolution.bias
        self._run = KERNELS.SsdStep(
            weight,
            bias,
            convolution.pieces(),
            (*sizes, norm_groups, *places),
            a,
            d,
            dt_bias,
            norm,
            eps,
            norm_before_gate,
            dt_limits,
        ).run

    def __call__(self, rows: Tensor, runs: PackedRuns, conv: Tensor, states: Tensor) -> Tensor:
        """conv [slots, C, kept], states [slots, H, P, N] fp32 -> [T, H P]."""
        return _run(self._run, self.width, rows, runs, conv, states)


class ShortConvStep:
    """A convolution between two gates: y = C ∘ conv(B ∘ x), without SiLU.

    Oracle: transformers' Lfm2ShortConv.
    """

    def __init__(self, convolution: Convolution) -> None:
        """A row: B, C, x."""
        weight, bias = convolution.weight, convolution.bias
        self.width = size = weight.shape[0]
        self._run = KERNELS.ShortConvStep(weight, bias, convolution.pieces(), (0, size, 2 * size)).run

    def __call__(self, rows: Tensor, runs: PackedRuns, conv: Tensor) -> Tensor:
        """rows [T, 3 C], conv [slots, C, kept] -> [T, C]."""
        return _run(self._run, self.width, rows, runs, conv)


class SiluConvStep:
    """The convolution alone: y = SiLU(conv(x))."""

    def __init__(self, convolution: Convolution) -> None:
        self.width = convolution.weight.shape[0]
        self._run = KERNELS.SiluConvStep(convolution.weight, convolution.bias, convolution.pieces()).run

    def __call__(self, rows: Tensor, runs: PackedRuns, conv: Tensor) -> Tensor:
        """conv [slots, C, kept] -> [T, C]."""
        return _run(self._run, self.width, rows, runs, conv)


class SelectiveScan:
    """Mamba-1: each channel's S' = e^(dt A) S + dt x B, y = (S' C + D x) SiLU(z).

    dt is the softplus of what is given. B and C may pass an RMS norm each before (Jamba).
    Source: arXiv 2312.00752.
    Oracle: transformers' mamba_selective_state_update, of prompts mamba_selective_scan.
    """

    def __init__(
        self, a: Tensor, d: Tensor, norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0
    ) -> None:
        """a [C, N], d [C] fp32; norms [N] each, of the dtype of the rows: of B and C."""
        by_state = (a * math.log2(math.e)).t().contiguous()
        self._run = KERNELS.SelectiveScan(by_state, d, *(norms or (None, None)), eps).run

    def __call__(
        self, x: Tensor, dt: Tensor, z: Tensor, bc: Tensor, runs: PackedRuns, states: Tensor
    ) -> Tensor:
        """x, dt, z [T, C], bc [T, 2 N], states [slots, C, N] fp32 -> [T, C]. Prompts and decoded tokens take
        the same loop."""
        out = torch.empty_like(x)
        self._run(x, dt, z, bc, runs.starts, runs.read, runs.write, states, out)
        return out


def _run(run: Any, width: int, rows: Tensor, runs: PackedRuns, *states: Tensor) -> Tensor:
    out = rows.new_empty((rows.shape[0], width))
    if not runs.parts:
        run(rows, runs.starts, runs.read, runs.write, *states, out)
    for where, part in runs.parts:
        out[where] = _run(run, width, rows[where], part, *states)
    return out
