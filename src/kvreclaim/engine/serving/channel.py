"""Python values between two processes, over a socket that never blocks."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import sys
from collections import deque
from typing import Any

HEAD = struct.Struct("!Q")
PIECE = 1 << 18
"""Most bytes that one `receive` reads, so that a reader is never occupied for long."""


class ChannelClosedError(Exception):
    """The other side has closed its socket."""


class Channel:
    """One end of a pair of connected sockets. Bytes that the other side does not accept yet are buffered.

    Values are pickled. This is safe: both ends belong to one program, and the socket is private to it.

    bell: an eventfd to ring after each send, where the other side polls that instead of the socket
    """

    def __init__(self, end: socket.socket, bell: int | None = None) -> None:
        end.setblocking(False)
        self._bell = bell
        self._socket = end
        self._pending: deque[memoryview] = deque()
        self._seen = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Return whether bytes are still to be sent: call flush when the socket is writable."""
        return bool(self._pending)

    @property
    def readable(self) -> bool:
        """Return whether bytes have arrived, or the other side has closed its socket."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def send(self, value: Any) -> None:
        """Send as much as the socket accepts now. Raises: ChannelClosedError."""
        body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self._pending.append(memoryview(HEAD.pack(len(body)) + body))
        self.flush()

    def flush(self) -> None:
        """Raises: ChannelClosedError."""
        while self._pending:
            piece = self._pending[0]
            try:
                num_sent = self._socket.send(piece)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError from error
            ring(self._bell)
            if num_sent < len(piece):
                self._pending[0] = piece[num_sent:]
            else:
                self._pending.popleft()

    def receive(self) -> list[Any]:
        """Read once. Returns: the values that are complete now. Raises: ChannelClosedError."""
        try:
            piece = self._socket.recv(PIECE)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosedError from error
        if not piece:
            raise ChannelClosedError
        self._seen += piece
        values, start = [], 0
        while len(self._seen) - start >= HEAD.size:
            (length,) = HEAD.unpack_from(self._seen, start)
            end = start + HEAD.size + length
            if len(self._seen) < end:
                break
            with memoryview(self._seen) as seen:
                values.append(pickle.loads(seen[start + HEAD.size : end]))
            start = end
        del self._seen[:start]
        return values

    def close(self) -> None:
        self._socket.close()


def new_bell() -> int | None:
    """Return an eventfd on Linux, None elsewhere. An eventfd wakes a process on any free core. A socket wakes
    it on the sender's core, where the two then wait for each other."""
    if sys.platform == "linux":
        return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    return None


def ring(bell: int | None) -> None:
    if sys.platform == "linux" and bell is not None:
        os.eventfd_write(bell, 1)
