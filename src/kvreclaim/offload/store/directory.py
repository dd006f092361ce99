"""Slot files in a directory: their owners, locks and sizes.

DIR/LOCK                            held while files are chosen, made and removed
DIR/<namespace, 64 hex>/meta.json   the namespace's fields, for people
DIR/<namespace>/slots.kv            records; locked by the process that uses it
DIR/<namespace>/slots.index         copies of their headers; belongs to slots.kv
DIR/<namespace>/slots.1.kv ...      of further processes at the same time
DIR/<namespace>/<64 hex>.prefix     compressed prefixes (prefix_files.py)
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.offload.store.namespace import Namespace

PATH_FIELD: Final = "kv_offloading_disk_path"
SIZE_FIELD: Final = "kv_offloading_disk_size"
LOCK: Final = "LOCK"
META: Final = "meta.json"
SLOTS: Final = ".kv"
INDEX: Final = ".index"
NAMESPACE_DIR = re.compile(r"[0-9a-f]{64}")
SLOTS_FILE = re.compile(r"slots(\.\d+)?\.kv")
FILE_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
DIR_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
LOCK_PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Found:
    """A slot file: paths within DIR, used_at in seconds, num_bytes together with its index."""

    slots: str
    index: str
    inode: int
    used_at: float
    num_bytes: int
    is_used: bool


class StoreDirectory:
    """DIR, opened and locked against other processes that choose files at the same time: a context manager.

    patience_s: seconds to wait for another process's lock

    Raises: InvalidArgumentError for a directory that can't be made or used, is world-writable, or stays
        locked by another process.
    """

    def __init__(self, path: str | os.PathLike[str], patience_s: float = LOCK_PATIENCE_S) -> None:
        self.path, self.patience_s = os.fspath(path), patience_s
        try:
            os.makedirs(self.path, 0o700, exist_ok=True)
            self.fd = os.open(self.path, DIR_FLAGS)
        except OSError as error:
            raise InvalidArgumentError(
                f"the directory {self.path!r} for blocks on disk can't be used ({error.strerror}); name one "
                "that this process may write to.",
                field=PATH_FIELD,
            ) from error
        try:
            self._refuse_shared(self.fd, self.path)
            self._lock = self.open_file(LOCK)
            self._wait_for_lock()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StoreDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close DIR and give up its lock; files taken from it stay open and locked."""
        for fd in (getattr(self, "_lock", None), self.fd):
            if fd is not None:
                os.close(fd)

    @staticmethod
    def _refuse_shared(fd: int, path: str) -> None:
        require(
            not os.fstat(fd).st_mode & stat.S_IWOTH,
            f"the directory {path!r} may be written to by everybody, who could then change or read what "
            "prompts have left there; name another, or take that right away (chmod o-w).",
            PATH_FIELD,
        )

    def _wait_for_lock(self) -> None:
        patience = time.monotonic() + self.patience_s
        while not try_lock(self._lock):
            require(
                time.monotonic() < patience,
                f"another process has been setting up {self.path!r} for {self.patience_s:.0f} s; wait for it "
                "or name another directory.",
                PATH_FIELD,
            )
            time.sleep(0.02)

    def open_file(self, name: str) -> int:
        """Open or create a file within DIR. Raises InvalidArgumentError; links are not followed."""
        path = os.path.join(self.path, name)
        try:
            fd = os.open(name, FILE_FLAGS | os.O_CREAT, 0o600, dir_fd=self.fd)
        except OSError as error:
            raise InvalidArgumentError(
                f"{path!r} can't be opened ({error.strerror}); remove it, or name another directory.",
                field=PATH_FIELD,
            ) from error
        try:
            self._refuse_foreign(os.fstat(fd), path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @staticmethod
    def _refuse_foreign(status: os.stat_result, path: str) -> None:
        """Refuse files that other users can read, write or rename: they could leak prompts or be forged."""
        require(stat.S_ISREG(status.st_mode), f"{path!r} is not a plain file; remove it.", PATH_FIELD)
        mine = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        require(
            mine and status.st_nlink == 1,
            f"{path!r} has {status.st_nlink} names and mode {stat.filemode(status.st_mode)} and belongs to "
            f"user {status.st_uid}; it must have one name and be user {os.geteuid()}'s alone: remove it.",
            PATH_FIELD,
        )

    def take(self, namespace: Namespace) -> tuple[int, int]:
        """Return (slots, index): this namespace's first slot file that no other process uses, locked."""
        self._make_namespace(namespace)
        number = 0
        while True:
            stem = f"{namespace.hex}/slots{f'.{number}' if number else ''}"
            fd = self.open_file(stem + SLOTS)
            try:
                if try_lock(fd):
                    os.utime(fd)
                    return fd, self.open_file(stem + INDEX)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            number += 1

    def _make_namespace(self, namespace: Namespace) -> None:
        path = os.path.join(self.path, namespace.hex)
        try:
            if namespace.hex not in os.listdir(self.fd):
                os.mkdir(namespace.hex, 0o700, dir_fd=self.fd)
            fd = os.open(namespace.hex, DIR_FLAGS | os.O_NOFOLLOW, dir_fd=self.fd)
        except OSError as error:
            raise InvalidArgumentError(
                f"the directory {path!r} can't be used ({error.strerror}); see to it or name another.",
                field=PATH_FIELD,
            ) from error
        try:
            self._refuse_shared(fd, path)
            status = os.fstat(fd)
            require(
                status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWGRP,
                f"the directory {path!r} has mode {stat.filemode(status.st_mode)} and belongs to user "
                f"{status.st_uid}; only user {os.geteuid()} may write to it: remove it.",
                PATH_FIELD,
            )
        finally:
            os.close(fd)
        text = json.dumps(namespace.fields, indent=1).encode()
        meta = self.open_file(f"{namespace.hex}/{META}")
        try:
            os.pwrite(meta, text, 0)
            os.ftruncate(meta, len(text))
        finally:
            os.close(meta)

    def bytes_beside(self, own: int, size_bytes: int) -> int:
        """Bytes of all files in DIR but the slot file `own` and its index, after removing enough.

        Files in use stay. Of the others the oldest are removed first, until own can have half of size_bytes,
        or what the files in use leave of it.
        """
        inode = os.fstat(own).st_ino
        others = [found for found in self._slot_files() if found.inode != inode]
        unused = [found for found in others if not found.is_used]
        room = size_bytes - size_bytes // 2 - sum(found.num_bytes for found in others if found.is_used)
        for found in sorted(unused, key=lambda found: found.used_at, reverse=True):
            room -= found.num_bytes
            if room < 0:
                self._remove(found)
        kept = [found for found in self._slot_files() if found.inode != inode]
        return sum(found.num_bytes for found in kept) + self._num_meta_bytes()

    def _namespaces(self) -> list[str]:
        return [name for name in os.listdir(self.fd) if NAMESPACE_DIR.fullmatch(name)]

    def _slot_files(self) -> list[Found]:
        return [
            self._found(f"{namespace}/{name}")
            for namespace in self._namespaces()
            for name in self._listed(namespace)
            if SLOTS_FILE.fullmatch(name)
        ]

    def _listed(self, namespace: str) -> list[str]:
        fd = os.open(namespace, DIR_FLAGS | os.O_NOFOLLOW, dir_fd=self.fd)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _found(self, slots: str) -> Found:
        index = slots.removesuffix(SLOTS) + INDEX
        fd = self.open_file(slots)
        try:
            status, is_used = os.fstat(fd), not try_lock(fd)
        finally:
            os.close(fd)
        num_bytes = status.st_size + self._size(index)
        return Found(slots, index, status.st_ino, status.st_mtime, num_bytes, is_used)

    def _size(self, name: str) -> int:
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def _num_meta_bytes(self) -> int:
        return sum(self._size(f"{namespace}/{META}") for namespace in self._namespaces())

    def _remove(self, found: Found) -> None:
        """Remove the index first: without its slots it would list missing records."""
        for name in (found.index, found.slots):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
        namespace = os.path.dirname(found.slots)
        if set(self._listed(namespace)) <= {META}:
            os.unlink(f"{namespace}/{META}", dir_fd=self.fd)
            os.rmdir(namespace, dir_fd=self.fd)


def try_lock(fd: int) -> bool:
    """Lock an open file until it is closed; False if another process, or another open file, has the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
