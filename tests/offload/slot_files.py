"""Small slot files, chains of keys for them, payloads that are known by their key, and disks that fail."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from struct import pack

from kvreclaim.memory.prefix.index import BlockName, root_uid, uid_of
from kvreclaim.offload.store.file_io import Buffer, FileIO
from kvreclaim.offload.store.namespace import FIELDS, Namespace
from kvreclaim.offload.store.slot_file import SlotFile, SlotLayout

BLOCK_SIZE = 4
PAYLOAD = 5000
LAYOUT = SlotLayout.of(PAYLOAD, BLOCK_SIZE)


def namespace(**changed: str) -> Namespace:
    return Namespace(dict.fromkeys(FIELDS, "same") | changed)


def size_for(num_slots: int) -> int:
    """Bytes of a directory that just hold a file of so many slots."""
    meta = sum(len(name) + len("same") + len('\n "": "",') for name in FIELDS) + len("{\n}") - len(",")
    return meta + num_slots * (LAYOUT.slot + LAYOUT.entry)


def open_slots(directory: Path, num_slots: int = 8, io: FileIO | None = None, **changed: str) -> SlotFile:
    return SlotFile.open(directory, namespace(**changed), PAYLOAD, BLOCK_SIZE, size_for(num_slots), io)


def child(parent: BlockName | None, *token_ids: int, salt: str | None = None, key: bytes = b"") -> BlockName:
    """The key of a block behind another one, or of a first one; `key` in place of its digest."""
    tokens = pack(f"<{BLOCK_SIZE}q", *token_ids)
    digest, uid, depth = (b"\0" * 32, root_uid(salt), 0)
    if parent is not None:
        digest, uid, depth = parent.key, parent.uid, parent.depth + 1
    key = key or hashlib.sha256(digest + uid + tokens).digest()
    return BlockName(key, digest, uid_of(uid, tokens), uid, depth, tokens)


def chain(length: int, first: int = 0) -> list[BlockName]:
    keys: list[BlockName] = []
    for i in range(length):
        keys.append(child(keys[-1] if keys else None, first, i, -i, 2**62))
    return keys


def payload(key: BlockName, version: int = 0) -> memoryview:
    """Bytes that belong to this record alone."""
    return memoryview(hashlib.shake_128(key.uid + bytes([version])).digest(PAYLOAD))


def empty() -> memoryview:
    return memoryview(bytearray(PAYLOAD))


class FailingIO(FileIO):
    """Raises or falls short where a field is set; `hold` stops reads and writes of slots until it is set.

    write_error, read_error, sync_error, allocate_error: errno; short: bytes less than requested
    """

    def __init__(self) -> None:
        self.write_error = self.read_error = self.sync_error = self.allocate_error = 0
        self.short = 0
        self.entered = threading.Semaphore(0)
        self.hold = threading.Event()
        self.hold.set()
        self.num_syncs = 0

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._stop()
        if self.read_error:
            raise OSError(self.read_error, "injected")
        return super().preadv(fd, buffers, offset) - self.short

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._stop()
        if self.write_error:
            raise OSError(self.write_error, "injected")
        if self.short:
            joined = b"".join(bytes(buffer) for buffer in buffers)
            return super().pwritev(fd, [joined[: -self.short]], offset)
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        if self.sync_error:
            raise OSError(self.sync_error, "injected")
        self.num_syncs += 1
        super().sync(fd)

    def allocate(self, fd: int, num_bytes: int) -> None:
        if self.allocate_error:
            raise OSError(self.allocate_error, "injected")
        super().allocate(fd, num_bytes)

    def _stop(self) -> None:
        if not self.hold.is_set():
            self.entered.release()
            self.hold.wait()
