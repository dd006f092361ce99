"""Starts without garbage collection, which would look through a million objects that stay, many times."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep what is imported or loaded in the block. Garbage is collected as before afterwards."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # they are now in the oldest generation, without having been looked through
        if is_on:
            gc.enable()
