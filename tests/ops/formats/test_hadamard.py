"""The rotation of int4 and turboquant4: orthogonal, mixes all dims of a block and is the same everywhere."""

from __future__ import annotations

import pytest
import torch

from kvreclaim.ops.formats.hadamard import block_of, rotate, sign_tensor, signs, unrotate

DIMS = (2, 8, 16, 24, 32, 40, 64, 80, 128)
EACH = pytest.mark.parametrize("dim", DIMS)
CPU = torch.device("cpu")


def noise(*size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(3), dtype=dtype)


@EACH
def test_it_keeps_products_and_can_be_undone(dim: int) -> None:
    x, y = noise(2, 5, dim)
    torch.testing.assert_close(unrotate(rotate(x)), x)
    torch.testing.assert_close((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1))


@EACH
def test_it_is_signs_then_hadamard_blocks(dim: int) -> None:
    """Entry (i, j) of a Hadamard matrix of Sylvester is (-1)^popcount(i & j)."""
    block = block_of(dim)
    want = torch.zeros(dim, dim)
    for i in range(dim):
        for j in range(i // block * block, i // block * block + block):
            want[i, j] = (-1) ** (i % block & j % block).bit_count() * block**-0.5 * signs(dim)[j]
    torch.testing.assert_close(rotate(torch.eye(dim)).T, want)
    x = noise(3, dim, dtype=torch.float32)
    torch.testing.assert_close(rotate(x), x @ want.T)


def test_blocks_are_the_largest_power_of_two() -> None:
    assert [block_of(dim) for dim in (64, 80, 96, 24, 576)] == [64, 16, 32, 8, 64]


def test_signs_are_the_bits_of_splitmix64_seeded_with_the_dim() -> None:
    first = 0xD6967248FBE68CC3
    assert list(signs(64)) == [-1.0 if first >> d & 1 else 1.0 for d in range(64)]
    assert signs(128)[:64] != signs(64)
    assert abs(sum(signs(512))) < 80
    assert sign_tensor(8, CPU).tolist() == list(signs(8))


def test_one_large_dim_is_spread() -> None:
    x = torch.zeros(64)
    x[17] = 8.0
    assert rotate(x).abs().tolist() == pytest.approx([1.0] * 64)
