"""The engine's process before it has an EngineSpec. It imports torch while this process continues; nothing in
this module needs torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from kvreclaim.engine.serving.channel import Channel, new_bell

PROGRAM = (
    "-c",
    "import gc; gc.disable(); from kvreclaim.engine.serving.core_process import end, main; main(); end()",
)


class Wakers:
    """Further wake-ups of the event loop: the bell, and the end of a pipe (life) that the process holds."""

    def __init__(self) -> None:
        self.bell = new_bell()
        self.life, self.held_there = os.pipe()
        self.open_here = [self.life, *([] if self.bell is None else [self.bell])]

    def close(self) -> None:
        while self.open_here:
            os.close(self.open_here.pop())


class StartedProcess:
    """A process that waits for an EngineSpec on its channel. As a context manager it ends the process on an
    error. The process also ends by itself when its socket closes."""

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.end()

    def end(self) -> None:
        """Close this side's sockets and pipes, and wait for the process to end."""
        self.channel.close()
        self.wakers.close()
        self.process.terminate()  # while it imports; later it does not listen, and its socket has closed
        self.process.wait()
