"""Python values between two processes, over a socket that never makes anybody wait."""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from typing import Any

HEAD = struct.Struct("!Q")
PIECE = 1 << 18
"""Bytes that are read at a time: whoever reads has other things to do."""


class ChannelClosedError(Exception):
    """The other side has gone."""


class Channel:
    """One end of a pair of connected sockets. What the other side does not take yet is kept here.

    Values are pickled: both ends belong to one program, and nobody else has the socket.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._pending: deque[memoryview] = deque()
        self._seen = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether something is still to be sent: call flush when the socket is writable."""
        return bool(self._pending)

    def send(self, value: Any) -> None:
        """Send as much as goes now. Raises: ChannelClosedError."""
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
            if num_sent < len(piece):
                self._pending[0] = piece[num_sent:]
            else:
                self._pending.popleft()

    def receive(self) -> list[Any]:
        """The values that are complete after one more piece. Raises: ChannelClosedError."""
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
