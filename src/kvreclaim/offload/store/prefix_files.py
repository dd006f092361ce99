"""Compressed prefixes on disk: a session file each, next to the slots of their namespace.

DIR/<namespace>/<name, 64 hex>.prefix
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.offload.store.directory import NAMESPACE_DIR, StoreDirectory
from kvreclaim.offload.store.file_io import FileIO
from kvreclaim.offload.store.jobs import JobOutcome, outcome_of
from kvreclaim.offload.store.namespace import Namespace
from kvreclaim.offload.store.session_file import SessionFile, save_whole

LOGGER = logging.getLogger(__name__)

SUFFIX: Final = ".prefix"
PREFIX_FILE = re.compile(r"[0-9a-f]{64}\.prefix")
LEFT_OVER = re.compile(r"\.[0-9a-f]{64}\.prefix\..*")
"""Temporary files of a process that was killed while writing."""
PAGE: Final = 4096
PATIENCE_S: Final = 5.0
"""Seconds to wait for another process that chooses, or writes, files in the same directory."""


@dataclass(frozen=True, slots=True)
class PrefixFile:
    """An existing file: bytes in whole pages, and time of last use."""

    path: Path
    num_bytes: int
    used_at: float


class PrefixFiles:
    """Blocking operations on these files, for threads that may wait for a disk.

    Together with all slot files in DIR they take at most size_bytes, and alone at most share_bytes, including
    those of other namespaces and processes; the least recently used are removed first. Any process may remove
    any of them at any time.

    Args:
        directory:   DIR, with a slot file of the namespace taken
        size_bytes:  of all files in DIR; share_bytes: of these alone
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        namespace: Namespace,
        size_bytes: int,
        share_bytes: int,
        io: FileIO | None = None,
    ) -> None:
        self.directory, self.namespace = Path(directory), namespace
        self.size_bytes, self.share_bytes = size_bytes, share_bytes
        self.io = FileIO() if io is None else io
        self._folder = self.directory / namespace.hex

    def scan(self) -> dict[str, int]:
        """Remove files above the share and return this namespace's names with their bytes: none, with a
        warning, where the directory cannot be read or stays locked."""
        try:
            with StoreDirectory(self.directory, PATIENCE_S):
                self._remove_left_over()
                self._make_room(0)
                return {
                    found.path.stem: found.num_bytes
                    for found in self._all()
                    if found.path.parent.name == self.namespace.hex
                }
        except (OSError, InvalidArgumentError) as error:
            LOGGER.warning("compressed prefixes on disk are not used again, they cannot be listed: %s", error)
            return {}

    def store(self, name: str, file: SessionFile) -> tuple[JobOutcome, int, list[str]]:
        """Returns: the outcome, the bytes written, and this namespace's names removed for it."""
        packed, gone = file.pack(), list[str]()
        num_bytes = pages(packed.num_bytes)
        try:
            with StoreDirectory(self.directory, PATIENCE_S):
                self._remove_left_over()
                if num_bytes > self._room():
                    return JobOutcome.DROPPED, num_bytes, gone
                gone = self._make_room(num_bytes)
                save_whole(packed, self._path(name), self.io)
        except InvalidArgumentError:  # another process holds the lock
            return JobOutcome.DROPPED, num_bytes, gone
        except OSError as error:
            return outcome_of(error), num_bytes, gone
        return JobOutcome.OK, num_bytes, gone

    def load(self, name: str, is_it: Callable[[SessionFile], bool]) -> SessionFile | JobOutcome:
        """Load a file if it is intact, of this engine, and the intended one; any other is removed."""
        path = self._path(name)
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return JobOutcome.HEADER
            file = SessionFile.load(path, self.namespace.fields, self.io)
            if is_it(file):
                self.touch(name)
                return file
            outcome = JobOutcome.OTHER
        except FileNotFoundError:
            return JobOutcome.BLANK
        except OSError as error:
            return outcome_of(error)
        except (InvalidArgumentError, MemoryError):
            outcome = JobOutcome.PAYLOAD
        self.remove(name)
        return outcome

    def touch(self, name: str) -> None:
        """Record a use, wherever the file lies."""
        with suppress(OSError):
            os.utime(self._path(name))

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(OSError):
            os.unlink(self._path(name))

    def clear(self) -> JobOutcome:
        try:
            for path in self._folder.iterdir():
                if PREFIX_FILE.fullmatch(path.name) or LEFT_OVER.fullmatch(path.name):
                    path.unlink(missing_ok=True)
        except OSError as error:
            return outcome_of(error)
        return JobOutcome.OK

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"

    def _room(self) -> int:
        """Bytes allowed for all files in DIR now."""
        others = 0
        for path in self._files():
            if not PREFIX_FILE.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    others += path.stat().st_size
        return min(self.share_bytes, self.size_bytes - others)

    def _remove_left_over(self) -> None:
        """Remove temporary files. DIR is locked, so none is being written."""
        for path in self._files():
            if LEFT_OVER.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> list[str]:
        """Remove the least recently used until this size fits. Returns: removed names of this namespace."""
        gone = list[str]()
        found, room = sorted(self._all(), key=lambda each: each.used_at), self._room() - num_bytes
        used = sum(each.num_bytes for each in found)
        for each in found:
            if used <= room:
                break
            each.path.unlink(missing_ok=True)
            used -= each.num_bytes
            if each.path.parent.name == self.namespace.hex:
                gone.append(each.path.stem)
        return gone

    def _all(self) -> list[PrefixFile]:
        found = []
        for path in self._files():
            if PREFIX_FILE.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    found.append(PrefixFile(path, pages(status.st_size), status.st_mtime))
        return found

    def _files(self) -> list[Path]:
        """Paths in all namespaces."""
        folders = [path for path in self.directory.iterdir() if NAMESPACE_DIR.fullmatch(path.name)]
        return [path for folder in folders for path in folder.iterdir()]


def pages(num_bytes: int) -> int:
    """Return the bytes of whole pages that hold this many bytes."""
    return -(-num_bytes // PAGE) * PAGE
