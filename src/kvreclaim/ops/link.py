"""Transfer of a host cache's pieces to the device: at once, or one ahead on a separate stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

Fetch = Callable[[int, int], None]
"""(turn, buffer): bring what a turn needs into a buffer."""


class HostLink(Protocol):
    """Turns 0, 1, 2, ... of a step, each in one of num_buffers buffers."""

    num_buffers: int

    def begin(self, num_turns: int, fetch: Fetch) -> None: ...

    def take(self, turn: int) -> int:
        """Return the buffer with this turn's bytes, valid for work queued before the next turn.

        Raises: what the fetch raised.
        """
        ...

    def gather(self, source: Tensor, ids: Tensor, target: Tensor, buffer: int) -> None:
        """Within a fetch: rows `ids` of source [B, ...] on the host to target [n, ...]."""
        ...

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Within a fetch: rows that lie together."""
        ...

    def copying(self) -> AbstractContextManager[Any]:
        """Context for other changes of the buffer within a fetch."""
        ...

    def finish(self) -> None:
        """Wait for all that was queued on the device."""
        ...

    def cancel(self) -> None:
        """Nothing is fetched any more when it returns."""
        ...


class DirectLink:
    """Link on a CPU: a piece is fetched on use, into one buffer, which stays in the processor's cache if it
    is small. A prefetching thread would take a core from attention."""

    num_buffers = 1

    def __init__(self) -> None:
        self._fetch: Fetch | None = None
        self._next = 0

    def begin(self, num_turns: int, fetch: Fetch) -> None:
        self._fetch, self._next = fetch, 0

    def take(self, turn: int) -> int:
        assert self._fetch is not None, "no step has begun"
        assert turn == self._next, f"turn {turn} is asked for, but {self._next} is next"
        self._next += 1
        self._fetch(turn, 0)
        return 0

    def gather(self, source: Tensor, ids: Tensor, target: Tensor, buffer: int) -> None:
        torch.index_select(source, 0, ids, out=target)

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def finish(self) -> None:
        pass

    def cancel(self) -> None:
        self._fetch = None


class Lanes(Protocol):
    """Two queues of a device: of computing, which the caller's thread is on, and of copying."""

    def copying(self) -> AbstractContextManager[Any]:
        """Context in which copies run on their own queue."""
        ...

    def computed(self, buffer: int) -> None:
        """Note that the computation queued so far is the last user of this buffer."""
        ...

    def wait_computed(self, buffer: int) -> None:
        """Copies from now on wait for that."""
        ...

    def copied(self, buffer: int) -> None:
        """All copies into this buffer have been queued."""
        ...

    def wait_copied(self, buffer: int) -> None:
        """Make computation that is queued from now on wait for the copies."""
        ...

    def free(self, buffer: int) -> None:
        """Return when the copies into this buffer that were queued last are over."""
        ...

    def wait(self) -> None:
        """Return when all that was queued for computing is over."""
        ...


class CudaLanes:
    """Streams and events of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._computed = [torch.cuda.Event() for _ in range(StreamLink.num_buffers)]
        self._copied = [torch.cuda.Event() for _ in range(StreamLink.num_buffers)]

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def computed(self, buffer: int) -> None:
        self._computed[buffer].record(torch.cuda.current_stream(self.device))

    def wait_computed(self, buffer: int) -> None:
        self._stream.wait_event(self._computed[buffer])

    def copied(self, buffer: int) -> None:
        self._copied[buffer].record(self._stream)

    def wait_copied(self, buffer: int) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._copied[buffer])

    def free(self, buffer: int) -> None:
        self._copied[buffer].synchronize()

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


class StreamLink:
    """One turn ahead: while a turn is computed, a thread gathers the next one's bytes into pinned memory and
    queues their copy into the other buffer.

    The thread waits only for the device; a buffer is refilled only after its last reader.
    """

    num_buffers = 2

    def __init__(self, lanes: Lanes, *, pins: bool) -> None:
        self.lanes = lanes
        self._pins = pins
        self._thread = ThreadPoolExecutor(1, "kvreclaim-stream")
        self._pending: Future[None] | None = None
        self._fetch: Fetch | None = None
        self._num_turns = self._next = 0
        self._staging: list[dict[int, Tensor]] = [{} for _ in range(self.num_buffers)]
        self._used: list[set[int]] = [set() for _ in range(self.num_buffers)]

    @classmethod
    def on(cls, device: torch.device) -> StreamLink:
        return cls(CudaLanes(device), pins=True)

    def begin(self, num_turns: int, fetch: Fetch) -> None:
        self._fetch, self._num_turns, self._next = fetch, num_turns, 0
        for buffer in range(self.num_buffers):
            self.lanes.computed(buffer)
        self._start(0)

    def take(self, turn: int) -> int:
        assert self._pending is not None, "no step has begun, or all turns were taken"
        assert turn == self._next, f"turn {turn} is asked for, but {self._next} is next"
        buffer, self._next = turn % self.num_buffers, turn + 1
        pending, self._pending = self._pending, None
        pending.result()
        self.lanes.wait_copied(buffer)
        self.lanes.computed((turn + 1) % self.num_buffers)
        self._start(turn + 1)
        return buffer

    def gather(self, source: Tensor, ids: Tensor, target: Tensor, buffer: int) -> None:
        staging = self._room(buffer, target)
        torch.index_select(source, 0, ids, out=staging)
        self.copy(staging, target)

    def copy(self, source: Tensor, target: Tensor) -> None:
        with self.copying():
            target.copy_(source, non_blocking=True)

    def copying(self) -> AbstractContextManager[Any]:
        return self.lanes.copying()

    def finish(self) -> None:
        self.lanes.wait()

    def cancel(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.cancel():
            pending.exception()
            for buffer in range(self.num_buffers):  # the next owner of its memory waits for its copies
                self.lanes.wait_copied(buffer)
        self._fetch = None

    def _start(self, turn: int) -> None:
        if turn < self._num_turns:
            self._pending = self._thread.submit(self._run, turn, turn % self.num_buffers)

    @torch.inference_mode()
    def _run(self, turn: int, buffer: int) -> None:
        assert self._fetch is not None, "no step has begun"
        self.lanes.free(buffer)
        self._used[buffer].clear()
        self.lanes.wait_computed(buffer)
        self._fetch(turn, buffer)
        self.lanes.copied(buffer)

    def _room(self, buffer: int, target: Tensor) -> Tensor:
        """Pinned memory of the shape of target, no other plane's of this turn; it grows by doubling."""
        size, made, used = target.nbytes, self._staging[buffer], self._used[buffer]
        number = len(used)
        used.add(number)
        if number not in made or made[number].nbytes < size:
            before = made.pop(number, None)
            most = max(size, 0 if before is None else 2 * before.nbytes)
            made[number] = torch.empty(most, dtype=torch.uint8, pin_memory=self._pins)
        return made[number][:size].view(target.dtype).view(target.shape)
