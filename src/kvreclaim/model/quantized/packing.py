"""Threads that pack a model's weights, and how far they are, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock

import torch
from tqdm import tqdm

from kvreclaim.ops.packed import Each

MOST_THREADS = 4
"""Each has a piece of a matrix unpacked, some MB."""
SHOWN_AFTER_S = 1.0
_one_at_a_time = Lock()
"""torch's number of threads is the process's: a second load would keep the first one's."""


@contextmanager
def packing(num_weights: int) -> Iterator[tuple[Each, Callable[[int], object]]]:
    """Start as many threads as torch has, at most MOST_THREADS, to pack num_weights in all.

    Gives: map over the threads, and what is told how many weights are done. Where stderr is a terminal, and
        it takes longer than SHOWN_AFTER_S, the share that is done stands there meanwhile.
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
        disable=None,  # unless it is a terminal
        leave=False,
    )
    torch.set_num_threads(1)  # threads take it over as they begin: each does its pieces alone
    try:
        with bar, ThreadPoolExecutor(min(threads, MOST_THREADS), "kvreclaim-packing") as pool:
            yield pool.map, bar.update
    finally:
        torch.set_num_threads(threads)
