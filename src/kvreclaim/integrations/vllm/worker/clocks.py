"""Facts about finished passes of a worker: how long they took, and which had NaN scores."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch
from torch import Tensor


class PassClock(Protocol):
    """One start and stop around the passes of a step; in between, flags."""

    def start(self) -> None: ...

    def watch(self, request_id: str, flag: Tensor) -> None:
        """flag: bool scalar on the device: the scores of a pass of this request hold a NaN."""
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

    def watch(self, request_id: str, flag: Tensor) -> None:
        if bool(flag):
            self.flagged.append(request_id)

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
        self.flags: list[tuple[str, Tensor]] = []


class DeviceClock:
    """CUDA events in the stream, read when the device has reached them."""

    def __init__(self) -> None:
        self.steps: deque[_Step] = deque()

    def start(self) -> None:
        self.steps.append(_Step())
        self.steps[-1].first.record()

    def watch(self, request_id: str, flag: Tensor) -> None:
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        self.steps[-1].flags.append((request_id, host.copy_(flag, non_blocking=True)))

    def stop(self) -> None:
        self.steps[-1].last.record()

    def take(self) -> tuple[float, list[str]] | None:
        done: list[_Step] = []
        while self.steps and self.steps[0].last.query():
            done.append(self.steps.popleft())
        if not done:
            return None
        flagged = [request_id for step in done for request_id, flag in step.flags if bool(flag)]
        return sum(step.first.elapsed_time(step.last) for step in done) / 1000, flagged
