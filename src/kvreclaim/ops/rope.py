"""Rotary position embedding as complex numbers: where the rotated dims lie, and how to turn them.

A vector of a head is read as F complex bands plus the dims that carry no position ("rest"). Every
function works on the last dim of a tensor and keeps the leading ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

RopeStyle = Literal["half", "interleaved"]


@dataclass(frozen=True, eq=False)
class RopeLayout:
    """Dims in which a layer's heads encode position, found by probing the model (ops/rope_probe.py).

    inv_freq: [F] float64, the model's own frequencies after its own scaling (linear, llama3, YaRN);
              F = 0 for a layer without rotary embedding.
    style:    "half": band f is dims (f, f+F); "interleaved": dims (2f, 2f+1); both relative to start.
    start:    first rotated dim; the dims outside [start, start + 2F) carry no position.
    """

    inv_freq: Tensor
    style: RopeStyle = "half"
    start: int = 0

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Return what equal layouts have in common; waits for the device once."""
        return (self.style, self.start, *self.inv_freq.tolist())

    @property
    def num_bands(self) -> int:
        return self.inv_freq.numel()

    @property
    def bands(self) -> tuple[slice, slice]:
        """Indices of the bands' real and imaginary dims."""
        end = self.start + 2 * self.num_bands
        if self.style == "half":
            return slice(self.start, self.start + self.num_bands), slice(self.start + self.num_bands, end)
        return slice(self.start, end, 2), slice(self.start + 1, end, 2)

    def band_dims(self) -> tuple[Tensor, Tensor]:
        """Indices [F] of the real and of the imaginary dims, on the CPU."""
        dims = torch.arange(self.start + 2 * self.num_bands)
        real, imag = self.bands
        return dims[real], dims[imag]

    def rest_dims(self, head_dim: int, device: torch.device | None = None) -> Tensor:
        """Indices [D - 2F] of the dims that are not rotated, ascending, on the CPU by default."""
        before = torch.arange(self.start, device=device)
        return torch.cat([before, torch.arange(self.start + 2 * self.num_bands, head_dim, device=device)])


def to_bands(x: Tensor, layout: RopeLayout) -> Tensor:
    """[..., D] real -> [..., F] complex (complex128 for float64 input, else complex64)."""
    real, imag = layout.bands
    x = x if x.dtype == torch.float64 else x.float()
    return torch.complex(x[..., real], x[..., imag])


def from_bands(bands: Tensor, rest: Tensor, layout: RopeLayout) -> Tensor:
    """[..., F] complex and [..., D - 2F] real -> [..., D] real; the inverse of to_bands and rest_dims."""
    head_dim = 2 * layout.num_bands + rest.shape[-1]
    out = rest.new_empty((*rest.shape[:-1], head_dim))
    real, imag = layout.bands
    out[..., real] = bands.real
    out[..., imag] = bands.imag
    out[..., : layout.start] = rest[..., : layout.start]
    out[..., layout.start + 2 * layout.num_bands :] = rest[..., layout.start :]
    return out


def phases(positions: Tensor, layout: RopeLayout) -> Tensor:
    """e^{i w_f p}: positions [...] -> [..., F] complex64; the angle is computed in float64,
    since float32 is off by up to 6e-3 at p = 131,072."""
    angle = positions.to(torch.float64)[..., None] * layout.inv_freq.to(positions.device)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotate(x: Tensor, positions: Tensor, layout: RopeLayout, *, inverse: bool = False) -> Tensor:
    """Rotate x [..., T, D] to positions [T] (inverse: back to position 0). fp32 inside, dtype of x out."""
    if layout.num_bands == 0:
        return x
    turn = phases(positions, layout)
    bands = to_bands(x, layout).to(torch.complex64) * (turn.conj() if inverse else turn)
    rest = x[..., layout.rest_dims(x.shape[-1], x.device)].float()
    return from_bands(bands, rest, layout).to(x.dtype)
