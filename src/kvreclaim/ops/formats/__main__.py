"""`python -m kvreclaim.ops.formats`: the errors of a round trip through each coded format, measured.

rms and worst of single numbers; "of bound": the worst error as a part of what docs/formats.md allows it, of
int4 among the rotated numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.kv_bytes import GROUP
from kvreclaim.ops.formats.affine import REACH
from kvreclaim.ops.formats.codecs import FP8_MAX, round_trip
from kvreclaim.ops.formats.format import FORMATS
from kvreclaim.ops.formats.hadamard import rotate


@dataclass(frozen=True, slots=True)
class Codec:
    """back: numbers [T, D] after a round trip; bound: the greatest error that each may have, or None; turn:
    into the numbers that the bound is about."""

    name: str
    back: Callable[[Tensor], Tensor]
    bound: Callable[[Tensor], Tensor] | None
    turn: Callable[[Tensor], Tensor] = Tensor.float


def vectors(name: str) -> Callable[[Tensor], Tensor]:
    """A format with codes per token."""
    return lambda x: round_trip(FORMATS[name], x, x)[0]


def amax_steps(levels: float) -> Callable[[Tensor], Tensor]:
    return lambda x: (x.abs().amax(-1, keepdim=True) / levels / 2).expand_as(x)


def fp8_steps(x: Tensor) -> Tensor:
    """Half a step of E4M3: 2^-4 of a number, or of the smallest step that its vector's scale leaves."""
    return torch.maximum(x.abs() / 16, x.abs().amax(-1, keepdim=True) / FP8_MAX / 1024)


def group_steps(x: Tensor) -> Tensor:
    parts = []
    for part in x.split(GROUP, -1):
        least, most = part.amin(-1, keepdim=True), part.amax(-1, keepdim=True)
        step = torch.maximum((most - least) / 15, (most + least).abs() / 2 / REACH)
        parts.append((step / 2).expand_as(part))
    return torch.cat(parts, -1)


CODECS = (
    Codec("int8", vectors("int8"), amax_steps(127)),
    Codec("fp8_e4m3", vectors("fp8_e4m3"), fp8_steps),
    Codec("int4", vectors("int4"), group_steps, rotate),
    Codec("turboquant4", vectors("turboquant4"), None),
)


def noise(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int, dim: int) -> dict[str, Tensor]:
    """[T, D] numbers: normal ones; with an offset in each channel, as keys have; with one channel 20 times as
    large."""
    plain = noise(tokens, dim)
    one_large = plain.clone()
    one_large[:, dim // 3] *= 20
    return {
        "N(0,1)": plain,
        "N(0,1) + channel offsets, sd 5": plain + 5 * noise(dim, seed=1),
        "N(0,1), one channel x 20": one_large,
    }


def main(tokens: int = 16_000) -> None:
    print(f"{'numbers':<32}{'D':>4}  {'format':<14}{'rms':>9}{'worst':>9}{'of bound':>10}")
    for dim in (32, 64, 128):
        for name, x in inputs(tokens, dim).items():
            for codec in CODECS:
                error = codec.back(x) - x
                share = "-"
                if codec.bound is not None:
                    share = f"{(codec.turn(error).abs() / codec.bound(codec.turn(x))).max().item():.4f}"
                rms, worst = error.square().mean().sqrt().item(), error.abs().max().item()
                print(f"{name:<32}{dim:>4}  {codec.name:<14}{rms:>9.4f}{worst:>9.4f}{share:>10}")


if __name__ == "__main__":
    main()
