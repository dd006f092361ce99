"""Settings with a host and a disk below the pool, and disks that fail or hang."""

from __future__ import annotations

import os
import threading

from kvreclaim.offload.store.file_io import FileIO

GIB = 2**30


def tiers(directory, **options):
    defaults = {
        "kv_offloading_size": 16e6 / GIB,
        "kv_offloading_disk_path": str(directory),
        "kv_offloading_disk_size": 32e6 / GIB,
        "kv_load_policy": "wait_complete",
    }
    return defaults | options


class Failing(FileIO):
    """Raises an OSError at some of its calls; without a number it writes and reads less."""

    def __init__(self, number, every):
        self.number, self.every, self.calls = number, every, 0

    def _fails(self):
        """Whether this call falls short. Raises: OSError where there is a number."""
        self.calls += 1
        if self.calls % self.every == 0 and self.number is not None:
            raise OSError(self.number, os.strerror(self.number))
        return self.calls % self.every == 0

    def pwritev(self, fd, buffers, offset):
        if self._fails():
            buffers = [b"".join(bytes(each) for each in buffers)[:100]]
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd, buffers, offset):
        return 100 if self._fails() else super().preadv(fd, buffers, offset)

    def sync(self, fd):
        self._fails()


class Held(FileIO):
    """Reads nothing before it is let."""

    def __init__(self):
        self.free = threading.Event()

    def preadv(self, fd, buffers, offset):
        self.free.wait()
        return super().preadv(fd, buffers, offset)
