"""The calls that touch a disk, in one place, so that tests can let them fail."""

from __future__ import annotations

import os
from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview


class FileIO:
    """Plain system calls; all raise OSError, and reads and writes may be shorter than asked for."""

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Make the file exactly so long, and have the disk set all of it aside."""
        os.ftruncate(fd, num_bytes)
        if num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)

    def sync(self, fd: int) -> None:
        """Data, and what is needed to find it again, have reached the disk."""
        getattr(os, "fdatasync", os.fsync)(fd)
