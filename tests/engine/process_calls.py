"""Calls that tests make in an engine's process: functions of a module that both processes import."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from settings import assert_idle

from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.engine.step.engine import StepResult


def idle(host: EngineCore) -> bool:
    assert_idle(host.llm)
    return True


def pid(host: EngineCore) -> int:
    return os.getpid()


def fails(host: EngineCore) -> None:
    raise ZeroDivisionError("of the test")


def panics(host: EngineCore) -> None:
    raise SystemExit("no Exception")


class Unspeakable(Exception):
    """Cannot be pickled."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first)


def fails_unspeakably(host: EngineCore) -> None:
    raise Unspeakable(1, 2)


def loads_slowly(host: EngineCore) -> None:
    """Statistics are read when the file `go` beside them exists, and not before."""
    from kvreclaim.compression.stats import QueryStats

    load = QueryStats.load

    def slowly(path: Any) -> QueryStats:
        while not Path(path).with_name("go").exists():
            time.sleep(0.002)
        return load(path)

    QueryStats.load = slowly  # type: ignore[method-assign]
    host.llm.compressors._stats.clear()


def num_steps(host: EngineCore) -> int:
    return host.engine.totals.steps


def zeros(size: int, host: EngineCore) -> bytes:
    """Return so many bytes."""
    return bytes(size)


def slow_down(host: EngineCore) -> None:
    """Ten steps take a second."""
    step = host.engine.step

    def slowly() -> StepResult:
        time.sleep(0.1)
        return step()

    host.engine.step = slowly  # type: ignore[method-assign]
