"""Threads that pack a model's weights, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock

import torch
from tqdm import tqdm

from kvreclaim.ops.packed import Each

MOST_THREADS = 4
"""Bounds memory: each thread holds a piece of an unpacked matrix, some MB."""
SHOWN_AFTER_S = 1.0
_one_at_a_time = Lock()
"""Serialises loads: torch's thread count is global, so a second load would inherit the first one's count."""


@contextmanager
def packing(num_weights: int) -> Iterator[tuple[Each, Callable[[int], object]]]:
    """Start as many threads as torch has, at most MOST_THREADS, to pack num_weights in all.

    Yields: a map over the threads, and a callback for the number of finished weights. On a terminal, a
        progress bar appears after SHOWN_AFTER_S.
    """
    with _one_at_a_time:
        yield from _packing(num_weights)


def _packing(num_weights: int) -> Iterator[tuple[Each, Callable[[int], object]]]:
    threads = torch.get_num_threads()
    bar = tqdm(
        total=num_weights,
        desc="Packing weights",
        bar_format="{desc} {percentage:3.0f} %",
        delay=SHOWN_AFTER_S,
        disable=None,  # shown only on a terminal
        leave=False,
    )
    torch.set_num_threads(1)  # inherited by the pool's threads
    try:
        with bar, ThreadPoolExecutor(min(threads, MOST_THREADS), "kvreclaim-packing") as pool:
            yield pool.map, bar.update
    finally:
        torch.set_num_threads(threads)
