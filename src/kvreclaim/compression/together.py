"""Choices of passes that are due together. An error does not affect other passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvreclaim.compression.compressor import Compressor


def choose_together(
    compressors: Sequence[Compressor], choose: Callable[[Compressor, list[int]], list[Any]]
) -> list[Any]:
    """Choose the kept slots of several passes, those with the same compressor together. If they fail
    together, each chooses alone.

    compressors: of each pass; choose: (compressor, places of the passes) -> the choice of each

    Returns: the choice of each, or its error.
    """
    members: dict[Compressor, list[int]] = {}
    for i, compressor in enumerate(compressors):
        members.setdefault(compressor, []).append(i)
    found: dict[int, Any] = {}
    for compressor, places in members.items():
        together = tried(choose, compressor, places)
        if isinstance(together, Exception):
            alone = [tried(choose, compressor, [i]) for i in places]
            together = [one if isinstance(one, Exception) else one[0] for one in alone]
        found.update(zip(places, together, strict=True))
    return [found[i] for i in range(len(compressors))]


def tried(work: Any, *args: Any) -> Any:
    """Call `work`. Returns: its result, or the error."""
    try:
        return work(*args)
    except Exception as error:
        return error
