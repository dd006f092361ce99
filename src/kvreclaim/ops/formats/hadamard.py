"""A fixed rotation that spreads a vector's energy evenly over its dims: signs, then a Hadamard matrix.

It makes the numbers of any vector nearly normal, so that one set of levels fits all.
Source: arXiv 2504.19874 (TurboQuant), which rotates at random; a Hadamard matrix with random signs costs
D log D additions instead of D^2 products.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def signs(dim: int) -> tuple[float, ...]:
    """Signs of `dim` dims: -1 where bit d of the splitmix64 stream seeded with dim is set, or 1."""
    words = _splitmix64(dim, -(-dim // 64))
    return tuple(-1.0 if words[d // 64] >> d % 64 & 1 else 1.0 for d in range(dim))


@cache
def sign_tensor(dim: int, device: torch.device) -> Tensor:
    """signs as [dim] fp32, made once: a graph's capture refuses tensors that are made of host data."""
    return torch.tensor(signs(dim), device=device)


def block_of(dim: int) -> int:
    """Return the largest power of two that divides dim: the rotation mixes that many dims at a time."""
    return dim & -dim


def rotate(x: Tensor) -> Tensor:
    """R x over the last dim: each block of block_of(D) dims, signed, times the orthonormal Hadamard matrix.

    x: [..., D] any float dtype. Returns: [..., D] fp32 (fp64 of fp64). ||R x|| = ||x||.
    """
    x = _real(x)
    return _hadamard(x * sign_tensor(x.shape[-1], x.device))


def unrotate(y: Tensor) -> Tensor:
    """R^T y: rotate undone."""
    y = _real(y)
    return _hadamard(y) * sign_tensor(y.shape[-1], y.device)


def _real(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _hadamard(x: Tensor) -> Tensor:
    """Each block of the last dim times H / sqrt(block), Sylvester's order; H is symmetric."""
    dim = x.shape[-1]
    block = block_of(dim)
    y = x.reshape(-1, block)
    half = 1
    while half < block:
        pairs = y.view(-1, block // (2 * half), 2, half)
        low, high = pairs.unbind(2)
        y = torch.stack((low + high, low - high), 2).reshape(-1, block)
        half *= 2
    return (y * block**-0.5).view(x.shape)


def _splitmix64(seed: int, count: int) -> list[int]:
    """Return the first numbers of Steele, Lea and Flood's generator."""
    mask, words = (1 << 64) - 1, []
    state = seed
    for _ in range(count):
        state = state + 0x9E3779B97F4A7C15 & mask
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        words.append(z ^ z >> 31)
    return words
