"""Sources of packed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from kvreclaim.ops.packed import BLOCK_ROWS, Each, PackedMatrix
from kvreclaim.weights.packed import PackedRows

CODES_AT_ONCE = 2**20
"""Codes that a thread unpacks at a time, one byte each."""


class WeightSource(Protocol):
    """Weights of one model by transformers' names. A returned weight leaves the source's memory."""

    @property
    def label(self) -> str:
        """Packing scheme, as it appears in fingerprints."""

    @property
    def packs_every_matrix(self) -> bool:
        """Return whether embedding, output layer and all linear layers are packed."""

    def packed(self, name: str, shape: tuple[int, int], each: Each) -> PackedMatrix | None:
        """Return the weight `name` [N, K]; None if it is not packed, or missing. each: maps over its pieces

        Raises: InvalidArgumentError, UnsupportedModelError.
        """

    def dense(self, name: str) -> Tensor | None:
        """Return an unpacked tensor in any dtype; None if it is missing."""

    def unread(self) -> list[str]:
        """Return the names of tensors that were never read."""


def in_pieces(shape: tuple[int, int], read: Callable[[int, int], PackedRows], each: Each) -> PackedMatrix:
    """Pack a matrix [N, K] piece by piece. read(first, last) returns the rows first to last - 1."""
    out, columns = shape
    step = max(1, CODES_AT_ONCE // columns // BLOCK_ROWS) * BLOCK_ROWS
    return PackedMatrix.read(read, out, step, each)
