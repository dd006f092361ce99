"""Timers that wrap parts of the engine from outside and can be removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from unittest.mock import patch


@dataclass(slots=True)
class PartTimer:
    """Seconds by part; nested parts each count their full time."""

    total: dict[str, float] = field(default_factory=dict)

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function with the timer."""

        def run(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.total[part] = self.total.get(part, 0.0) + perf_counter() - started

        return run

    def take(self) -> dict[str, float]:
        """Return and reset the seconds."""
        found, self.total = self.total, {}
        return found


@contextmanager
def timers(clock: PartTimer, parts: list[tuple[Any, str, str]]) -> Iterator[None]:
    """Time every (owner, attribute, part) during the block. Owners are modules or instances."""
    with ExitStack() as stack:
        for owner, name, part in parts:
            stack.enter_context(patch.object(owner, name, clock.timed(part, getattr(owner, name))))
        yield


class TimedOps:
    """A back-end with timed functions, by their names."""

    def __init__(self, backend: Any, clock: PartTimer) -> None:
        self._backend, self._clock = backend, clock
        self._timed: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self._timed:
            found = getattr(self._backend, name)
            self._timed[name] = self._clock.timed(name, found) if callable(found) else found
        return self._timed[name]
