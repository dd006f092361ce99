"""The number of threads that kernels run on. torch counts cores; a CPU may run two threads on each."""

from __future__ import annotations

import os
import time
from functools import cache

import torch

from kvreclaim.ops.extension import KERNELS
from kvreclaim.ops.native.packed import packed_linear
from kvreclaim.ops.packed import PackedMatrix
from kvreclaim.weights.packed import CodeRule, PackedRows

WORTH = 1.05
"""So many times as fast more threads must be."""
ROUNDS = 5
LAYERS, SIZE = 8, 2048


def use_threads(count: int | None) -> None:
    """Set torch's number of threads, which is the kernels', too.

    count: None: leave it; 0: choose by a trial, unless OMP_NUM_THREADS is set
    """
    if count:
        torch.set_num_threads(count)
    elif count == 0 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(fastest())


@cache
def fastest() -> int:
    """torch's number of threads, or as many as this process may run at once where these are faster."""
    own, most = torch.get_num_threads(), len(_usable())
    if most <= own or KERNELS is None:
        return own
    try:
        seconds = _trial((own, most))
    finally:
        torch.set_num_threads(own)
    return most if seconds[own] >= WORTH * seconds[most] else own


def _usable() -> range | set[int]:
    """Hardware threads that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _trial(counts: tuple[int, ...]) -> dict[int, float]:
    """Seconds of one token's products with 4-bit weights (16 MiB), the best of ROUNDS in turns."""
    rows = PackedRows(
        torch.randint(0, 16, (SIZE, SIZE), dtype=torch.uint8),
        bits=4,
        grid=CodeRule.SCALE,
        group=32,
        scales=torch.full((SIZE, SIZE // 32), 0.01),
    )
    layers = [PackedMatrix([rows], SIZE) for _ in range(LAYERS)]
    x, seconds = torch.ones(1, SIZE), dict.fromkeys(counts, float("inf"))
    for _ in range(ROUNDS):
        for count in counts:
            torch.set_num_threads(count)
            packed_linear(x, layers[:1])  # the team of threads is there
            start = time.perf_counter()
            for layer in layers:
                packed_linear(x, [layer])
            seconds[count] = min(seconds[count], time.perf_counter() - start)
    return seconds
