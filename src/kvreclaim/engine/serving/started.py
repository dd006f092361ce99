"""The engine's process before it knows what to run. It imports torch while this process does something else:
nothing here needs it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import TracebackType

from kvreclaim.engine.serving.channel import Channel, new_bell

PROGRAM = (
    "-c",
    "import gc; gc.disable(); from kvreclaim.engine.serving.core_process import end, main; main(); end()",
)


class Wakers:
    """Other things that wake the event loop: the bell, and the end of a pipe (life) that the process
    holds."""

    def __init__(self) -> None:
        self.bell = new_bell()
        self.life, self.held_there = os.pipe()
        self.open_here = [self.life, *([] if self.bell is None else [self.bell])]

    def close(self) -> None:
        while self.open_here:
            os.close(self.open_here.pop())


class StartedProcess:
    """It waits for an EngineSpec on its channel. As a context manager it ends the process on an error: whose
    socket closes, ends by itself."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.wakers = Wakers()
        with theirs:
            passed = [theirs.fileno(), *([] if self.wakers.bell is None else [self.wakers.bell])]
            self.process = subprocess.Popen(
                [sys.executable, *PROGRAM, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                pass_fds=[*passed, self.wakers.held_there],
            )
            os.close(self.wakers.held_there)
        self.channel = Channel(ours)

    def __enter__(self) -> StartedProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.end()

    def end(self) -> None:
        """Close what is open here, and wait for it."""
        self.channel.close()
        self.wakers.close()
        self.process.terminate()  # while it imports; later it does not listen, and its socket has closed
        self.process.wait()
