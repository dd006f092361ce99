"""Log-probabilities between processes: arrays of numbers that become objects when they are read."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar, cast

from kvreclaim.engine.sampling.logprobs import Logprob

R = TypeVar("R", dict[int, Logprob], dict[int, Logprob] | None)

NONE = -1
"""The size of a report that is None."""


class Reports(Generic[R]):
    """Reports of consecutive tokens in four arrays.

    Each iteration makes new objects, at about 1 us per log-probability. Do not iterate in the engine's loop.
    """

    __slots__ = ("_ids", "_logprobs", "_ranks", "_sizes")

    def __init__(self, reports: Sequence[R]) -> None:
        given = [report for report in reports if report is not None]
        found = [logprob for report in given for logprob in report.values()]
        self._sizes = array("q", [NONE if report is None else len(report) for report in reports])
        self._ids = array("q", [token_id for report in given for token_id in report])
        self._logprobs = array("d", [each.logprob for each in found])
        self._ranks = array("q", [each.rank for each in found])

    def extend(self, later: Reports[R]) -> None:
        """Append the reports of the tokens that follow."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(later, name))

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[R]:
        entries = zip(self._ids, map(Logprob, self._logprobs, self._ranks), strict=True)
        for size in self._sizes:
            yield cast(R, None if size == NONE else dict(islice(entries, size)))

    def __getstate__(self) -> list[bytes]:
        return [getattr(self, name).tobytes() for name in self.__slots__]

    def __setstate__(self, state: list[bytes]) -> None:
        for name, held in zip(self.__slots__, state, strict=True):
            numbers: array[Any] = array("d" if name == "_logprobs" else "q")
            numbers.frombytes(held)
            setattr(self, name, numbers)
