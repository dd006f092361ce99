"""A persistent file of equally long slots, one record each."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Final

from kvreclaim.checks import check_int
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.prefix.index import BlockName
from kvreclaim.offload.store import record
from kvreclaim.offload.store.directory import SIZE_FIELD, StoreDirectory
from kvreclaim.offload.store.file_io import FileIO
from kvreclaim.offload.store.jobs import JobOutcome, outcome_of
from kvreclaim.offload.store.namespace import Namespace
from kvreclaim.offload.store.record import RecordHeader

UNKNOWN: Final = bytes(8)
"""Replaces an index entry: the slot's own header decides."""
FREE: Final = b"FREE\0\0\0\0"
"""Replaces an index entry: the slot has no record."""
CHUNK_BYTES: Final = 1 << 20
"""Bytes of the index per read."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Lengths in bytes of a slot's parts.

    payload: of a block; header: before it; entry: of the header in the index; slot: header, payload and
    padding to whole pages
    """

    payload: int
    header: int
    entry: int
    slot: int

    @classmethod
    def of(cls, bytes_per_block: int, block_size: int) -> SlotLayout:
        header = record.header_bytes(block_size)
        slot = header + record.page_bytes(bytes_per_block)
        return cls(bytes_per_block, header, record.entry_bytes(block_size), slot)


@dataclass(frozen=True, slots=True)
class Recovered:
    """A slot's record. written_at: Unix seconds."""

    slot: int
    record: BlockName
    seq: int
    written_at: int


class SlotFile:
    """Records in slots, recovered after a restart.

    A slot is written in place. It is intact if its header's crc32 and its payload's checksum match, which
    every read checks; a torn one is no record. The index repeats the headers to speed up starts: a slot's
    entry is made UNKNOWN before the slot is written, and becomes its header after, so a killed process leaves
    no entry that contradicts its slot.

    Two threads may use it at once, on different slots. Only `open` and `close` raise errors of the disk.

    Attributes: num_slots; num_bytes: of the slots and their index.
    """

    def __init__(
        self,
        fds: tuple[int, int],
        namespace: Namespace,
        layout: SlotLayout,
        num_slots: int,
        num_old: int,
        io: FileIO,
    ) -> None:
        self.namespace = namespace
        self.layout = layout
        self.num_slots = num_slots
        self.num_bytes = num_slots * (layout.slot + layout.entry)
        self.io = io
        self.slots_fd, self.index_fd = fds
        self._num_old = num_old
        self._seq = 0
        self._lock = Lock()

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        namespace: Namespace,
        bytes_per_block: int,
        block_size: int,
        size_bytes: int,
        io: FileIO | None = None,
        *,
        reserved_bytes: int = 0,
    ) -> SlotFile:
        """Take this namespace's file in a directory, or make one, as large as size_bytes permits.

        Args:
            size_bytes: of all files in the directory, including other processes and namespaces
            reserved_bytes: of these, for other files than slot files

        Raises: InvalidArgumentError for a directory that can't be used, a size without room for one block, or
            a disk without the space, all of which is allocated here.
        """
        check_int("size_bytes", size_bytes, 1, field=SIZE_FIELD)
        layout, io = SlotLayout.of(bytes_per_block, block_size), FileIO() if io is None else io
        with StoreDirectory(directory) as place:
            fds = place.take(namespace)
            try:
                size_bytes -= reserved_bytes
                beside = place.bytes_beside(fds[0], size_bytes)
                num_slots = (size_bytes - beside) // (layout.slot + layout.entry)
                if num_slots < 1:
                    raise InvalidArgumentError(
                        f"a block takes {layout.slot + layout.entry} bytes on disk, and of the {size_bytes} "
                        f"bytes for blocks in {place.path!r} ({reserved_bytes} more are for compressed "
                        f"prefixes) other files in use there take {beside}; give it more, lower "
                        "prefix_snapshot_fraction, or name another directory.",
                        field=SIZE_FIELD,
                    )
                num_old = os.fstat(fds[0]).st_size // layout.slot
                _set_aside(io, fds, layout, num_slots, place.path)
            except BaseException:
                for fd in fds:
                    os.close(fd)
                raise
        return cls(fds, namespace, layout, num_slots, num_old, io)

    def write(self, slot: int, key: BlockName, payload: memoryview) -> JobOutcome:
        """Write a record into a slot. On failure the slot has no record, or an intact one, the old or the
        new."""
        layout = self.layout
        assert payload.nbytes == layout.payload, f"{payload.nbytes} bytes of a block of {layout.payload}"
        with self._lock:
            self._seq += 1
            seq = self._seq
        digest = record.checksum(payload)
        header = RecordHeader(
            self.namespace.digest, key, layout.payload, record.XXH3_128, digest, seq, int(time.time())
        )
        try:
            self._put_entry(slot, UNKNOWN)
            head = record.pack(header, layout.header)
            num_written = self.io.pwritev(self.slots_fd, [head, payload], slot * layout.slot)
            if num_written < layout.header + layout.payload:
                return JobOutcome.SHORT
            self._put_entry(slot, record.pack(header, layout.entry))
        except OSError as error:
            return outcome_of(error)
        return JobOutcome.OK

    def read(self, slot: int, key: BlockName, out: memoryview) -> JobOutcome:
        """Read a slot into out if it has exactly this record; else out's content is undefined."""
        layout = self.layout
        assert out.nbytes == layout.payload, f"{out.nbytes} bytes for a block of {layout.payload}"
        raw = bytearray(layout.header)
        try:
            num_read = self.io.preadv(self.slots_fd, [raw, out], slot * layout.slot)
        except OSError as error:
            return outcome_of(error)
        if num_read < layout.header + layout.payload:
            return JobOutcome.SHORT
        header = self._mine(record.unpack(raw))
        if isinstance(header, JobOutcome):
            return header
        if header.record != key:
            return JobOutcome.OTHER
        return JobOutcome.OK if record.checksum(out) == header.checksum else JobOutcome.PAYLOAD

    def _mine(self, header: RecordHeader | JobOutcome) -> RecordHeader | JobOutcome:
        """Return the header if its record can belong to this file."""
        if isinstance(header, JobOutcome):
            return header
        if header.namespace != self.namespace.digest:
            return JobOutcome.NAMESPACE
        if header.checksum_kind != record.XXH3_128:
            return JobOutcome.VERSION
        return header if header.payload_len == self.layout.payload else JobOutcome.LENGTH

    def _put_entry(self, slot: int, entry: bytes) -> None:
        self.io.pwritev(self.index_fd, [entry], slot * self.layout.entry)

    def recover(self, *, chained: bool = True) -> list[Recovered]:
        """Return the recoverable records, parents first. Call once, before the first write.

        chained: whether each needs its parent; else the oldest come first

        They come from the index. Slots without an entry are read whole: after a kill those that were being
        written, and all of them if the index is lost. Unreadable records are omitted.
        """
        per_chunk = max(1, CHUNK_BYTES // self.layout.entry)
        found: list[Recovered] = []
        for first in range(0, self.num_slots, per_chunk):
            found += self._recover_chunk(first, min(per_chunk, self.num_slots - first))
        self._seq = max((each.seq for each in found), default=0)
        return _usable(found) if chained else _latest(found)

    def _recover_chunk(self, first: int, count: int) -> list[Recovered]:
        """Return the records of these slots, completing the index."""
        size, found, is_complete = self.layout.entry, [], True
        chunk = memoryview(bytearray(count * size))
        with suppress(OSError):  # missing entries stay UNKNOWN
            self.io.preadv(self.index_fd, [chunk], first * size)
        for slot in range(first, first + count):
            entry = chunk[(slot - first) * size :][:size]
            if entry[: len(FREE)] == FREE:
                continue
            known: RecordHeader | JobOutcome | bytes = self._mine(record.unpack(entry))
            if isinstance(known, JobOutcome):
                is_complete = False
                known = self._whole_record(slot)
                new = known if isinstance(known, bytes) else record.pack(known, size)
                entry[: len(new)] = new
            if isinstance(known, RecordHeader):
                found.append(Recovered(slot, known.record, known.seq, known.written_at))
        if not is_complete:
            with suppress(OSError):
                self.io.pwritev(self.index_fd, [chunk], first * size)
        return found

    def _whole_record(self, slot: int) -> RecordHeader | bytes:
        """Return the header of a slot with an intact payload, or FREE; UNKNOWN if the disk fails."""
        if slot >= self._num_old:
            return FREE
        layout = self.layout
        raw = bytearray(layout.header)
        try:
            self.io.preadv(self.slots_fd, [raw], slot * layout.slot)
        except OSError:
            return UNKNOWN
        header = self._mine(record.unpack(raw))
        if isinstance(header, JobOutcome):
            return FREE
        outcome = self.read(slot, header.record, memoryview(bytearray(layout.payload)))
        if outcome is JobOutcome.OK:
            return header
        return FREE if outcome.is_corrupt else UNKNOWN

    def clear(self) -> JobOutcome:
        """Delete all records on disk. Concurrent reads are misses."""
        try:
            for fd, size in ((self.index_fd, self.layout.entry), (self.slots_fd, self.layout.slot)):
                self.io.allocate(fd, 0)
                self.io.allocate(fd, self.num_slots * size)
        except OSError as error:
            return outcome_of(error)
        return JobOutcome.OK

    def sync(self) -> JobOutcome:
        """Flush everything written, to survive a power failure."""
        try:
            self.io.sync(self.slots_fd)
            self.io.sync(self.index_fd)
        except OSError as error:
            return outcome_of(error)
        return JobOutcome.OK

    def close(self) -> None:
        """Release the file for other processes. No read or write may be in progress."""
        os.close(self.slots_fd)
        os.close(self.index_fd)


def _set_aside(io: FileIO, fds: tuple[int, int], layout: SlotLayout, num_slots: int, path: str) -> None:
    """Allocate both files at full length on disk; on failure restore their lengths."""
    lengths = [os.fstat(fd).st_size for fd in fds]
    wanted = [num_slots * layout.slot, num_slots * layout.entry]
    try:
        if sum(wanted) - sum(os.fstat(fd).st_blocks * 512 for fd in fds) > _free_bytes(fds[0]):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # before the disk is completely full
        for fd, num_bytes in zip(fds, wanted, strict=True):
            io.allocate(fd, num_bytes)
    except OSError as error:
        for fd, num_bytes in zip(fds, lengths, strict=True):
            os.ftruncate(fd, num_bytes)
        raise InvalidArgumentError(
            f"the disk of {path!r} can't set aside {sum(wanted)} bytes for blocks ({error.strerror}; "
            f"{sum(lengths)} were there, {_free_bytes(fds[0])} are free); lower the size or name a "
            "directory on another disk.",
            field=SIZE_FIELD,
        ) from error


def _free_bytes(fd: int) -> int:
    disk = os.statvfs(fd)
    return disk.f_bavail * disk.f_frsize


def _latest(found: Iterable[Recovered]) -> list[Recovered]:
    """Return the last record of each key, the oldest first."""
    last: dict[bytes, Recovered] = {}
    for each in found:
        other = last.get(each.record.key)
        if other is None or other.seq < each.seq:
            last[each.record.key] = each
    return sorted(last.values(), key=lambda each: each.seq)


def _usable(found: Iterable[Recovered]) -> list[Recovered]:
    """Return the last record of each key with all ancestors present, parents first.

    The parent is the record with the uid, key and depth named by the child, so prefixes with colliding keys
    keep their own children.
    """
    reached: dict[bytes, tuple[bytes, int]] = {}
    kept = []
    for each in sorted(_latest(found), key=lambda each: each.record.depth):
        mine = each.record
        if mine.depth == 0 or reached.get(mine.parent_uid) == (mine.parent, mine.depth - 1):
            reached[mine.uid] = (mine.key, mine.depth)
            kept.append(each)
    return kept
