"""Where packed weights come from, and the pieces in which they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kvreclaim.ops.packed import BLOCK_ROWS, Each, PackedMatrix
from kvreclaim.weights.packed import PackedRows

CODES_AT_ONCE = 2**20
"""Codes that a thread unpacks at a time, to a byte each."""


class WeightSource(Protocol):
    """The weights of one model by transformers' names. What was given out leaves the source's memory."""

    @property
    def label(self) -> str:
        """The way of packing, as in a fingerprint."""

    @property
    def packs_every_matrix(self) -> bool:
        """Whether embedding, output layer and all linear layers are packed."""

    def packed(self, name: str, shape: tuple[int, int], each: Each) -> PackedMatrix | None:
        """The weight `name` [N, K]; None where it is not packed, or not there. each: does its pieces

        Raises: InvalidArgumentError, UnsupportedModelError.
        """

    def dense(self, name: str) -> Tensor | None:
        """A tensor that is not packed, in any dtype; None where it is not there."""

    def unread(self) -> list[str]:
        """Tensors that no name asked for, and that would be lost."""


def in_pieces(shape: tuple[int, int], read: Callable[[int, int], PackedRows], each: Each) -> PackedMatrix:
    """A matrix [N, K] of read(first, last), the rows first to last - 1."""
    out, columns = shape
    step = max(1, CODES_AT_ONCE // columns // BLOCK_ROWS) * BLOCK_ROWS
    return PackedMatrix.read(read, out, step, each)
