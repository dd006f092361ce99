"""All disk system calls, so that tests can inject failures."""

from __future__ import annotations

import os
from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview


class FileIO:
    """Plain system calls; all raise OSError, and reads and writes may be partial."""

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Set the file's length and allocate all of it on disk."""
        os.ftruncate(fd, num_bytes)
        if num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)

    def sync(self, fd: int) -> None:
        """Flush data and the metadata needed to find it."""
        getattr(os, "fdatasync", os.fsync)(fd)
