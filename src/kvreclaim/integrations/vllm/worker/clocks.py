"""Facts about finished passes of a worker: how long they took, and which had NaN scores."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class PassClock(Protocol):
    """One start and stop around the passes of a step; in between, flags."""

    def start(self) -> None: ...

    def watch(self, request_ids: Sequence[str], flags: Tensor) -> None:
        """flags: [n] bool: the scores of a pass of each of these requests hold a NaN."""
        ...

    def stop(self) -> None: ...

    def take(self) -> tuple[float, list[str]] | None:
        """Return the seconds between starts and stops that were reached since the last call, and the requests
        with a true flag; None if there were none. Never waits for the device."""
        ...


class HostClock:
    """Clock for devices that compute synchronously."""

    def __init__(self) -> None:
        self.started, self.seconds, self.steps = 0.0, 0.0, 0
        self.flagged: list[str] = []

    def start(self) -> None:
        self.started = time.perf_counter()

    def watch(self, request_ids: Sequence[str], flags: Tensor) -> None:
        self.flagged += [name for name, flag in zip(request_ids, flags.tolist(), strict=True) if flag]

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self.started
        self.steps += 1

    def take(self) -> tuple[float, list[str]] | None:
        if not self.steps:
            return None
        found = self.seconds, self.flagged
        self.seconds, self.steps, self.flagged = 0.0, 0, []
        return found


class _Step:
    """Events around one step's passes, and their flags on the way to the host."""

    def __init__(self) -> None:
        self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flags: list[tuple[Sequence[str], Tensor]] = []


class DeviceClock:
    """CUDA events in the stream, read when the device has reached them."""

    def __init__(self) -> None:
        self.steps: deque[_Step] = deque()

    def start(self) -> None:
        self.steps.append(_Step())
        self.steps[-1].first.record()

    def watch(self, request_ids: Sequence[str], flags: Tensor) -> None:
        host = torch.empty(len(flags), dtype=torch.bool, pin_memory=True)
        self.steps[-1].flags.append((request_ids, host.copy_(flags, non_blocking=True)))

    def stop(self) -> None:
        self.steps[-1].last.record()

    def take(self) -> tuple[float, list[str]] | None:
        done: list[_Step] = []
        while self.steps and self.steps[0].last.query():
            done.append(self.steps.popleft())
        if not done:
            return None
        named = [zip(names, flags.tolist(), strict=True) for step in done for names, flags in step.flags]
        flagged = [name for each in named for name, flag in each if flag]
        return sum(step.first.elapsed_time(step.last) for step in done) / 1000, flagged
