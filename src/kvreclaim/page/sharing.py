"""Shared blocks: the blocks of sequences as a radix tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

MAX_ROWS: Final = 40
"""Most rows of the tree; what comes behind is left out."""


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Blocks that the same sequences hold, behind each other: a node of the tree.

    level:      nodes above it
    num_blocks: of this node alone
    requests:   holders of the blocks: indices into the running requests, in the order of admission
    num_sequences: that hold them
    """

    level: int
    num_blocks: int
    requests: tuple[int, ...]
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """runs: from the top down, MAX_ROWS at most; num_spared: additional blocks that would be taken
    without sharing."""

    runs: tuple[SharedRun, ...]
    num_spared: int


def share_tree(rows: Sequence[np.ndarray], owners: Sequence[int]) -> Sharing:
    """Every run of blocks that several sequences hold, and what each has of its own behind it, from the top
    down. O(blocks), in numpy.

    Args:
        rows:   of each sequence, the ids of its blocks in their order, int32
        owners: of each sequence, the index of its request

    No tokens and no salts: the sharing without the content.
    """
    ordered = sorted(zip(rows, owners, strict=True), key=lambda each: each[0].tobytes())
    runs = _tree([row for row, _ in ordered], [owner for _, owner in ordered])
    spared = sum(run.num_blocks * (run.num_sequences - 1) for run in runs)
    return Sharing(tuple(runs[:MAX_ROWS]), spared)


def _tree(rows: list[np.ndarray], owners: list[int]) -> list[SharedRun]:
    """rows: block ids, such that equal beginnings stand together."""
    common = [_common(first, second) for first, second in pairwise(rows)]
    found: list[SharedRun] = []
    stack = [(part, 0, 0) for part in _parts(range(len(rows)), 0, common)]
    while stack:
        part, above, level = stack.pop()
        alone = len(part) == 1
        length = len(rows[part[0]]) if alone else min(common[place] for place in part[:-1])
        if length == above or (alone and not level):
            continue  # it has nothing of its own, or shares nothing
        requests = tuple(sorted({owners[place] for place in part}))
        found.append(SharedRun(level, length - above, requests, len(part)))
        if not alone:
            stack += [(each, length, level + 1) for each in _parts(part, length, common)]
    return found


def _parts(part: range, length: int, common: list[int]) -> list[range]:
    """Rows of a part that have more than so many blocks in common, the last ones first."""
    cuts = [place + 1 for place in part[:-1] if common[place] == length]
    bounds = pairwise([part.start, *cuts, part.stop])
    return [range(first, end) for first, end in bounds if end > first][::-1]


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Leading blocks that are the same."""
    least = min(len(first), len(second))
    other = np.flatnonzero(first[:least] != second[:least])
    return int(other[0]) if len(other) else least
