"""Files that hold copies of packed weights: their paths, their headers and the bytes that they take.

A file holds the matrices' bytes, each part on a page of its own, then JSON, then a trailer of the JSON's
sha256, its length and MAGIC.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvreclaim.model_paths import packed_home
from kvreclaim.temporary import PREFIX, remove_left_over

MAGIC = b"kvreclaim packed"
TRAILER = struct.Struct(f"<32sQ{len(MAGIC)}s")
END, MAKING = ".packed", f"{PREFIX}packed-"
"""Suffix of finished copies, and prefix of copies that are being written."""
LONGEST_STEM = 100
MOST_BYTES = 64 << 30
"""Limit of all copies together; the least recently used ones are deleted first."""
SPARE_BYTES = 1 << 30
"""Disk space that copies leave free."""


@dataclass(frozen=True, slots=True)
class CopyFile:
    """A copy on the disk.

    source: the model file that was copied
    used:   time of the last read or write, in seconds since 1970
    """

    path: Path
    source: Path
    num_bytes: int
    used: float

    @property
    def name(self) -> str:
        """Name in `kvreclaim ls` and `kvreclaim rm`."""
        return f"packed/{self.path.name.removesuffix(END)}"


def copy_path(source: Path) -> Path:
    """Return the path of a model file's copy."""
    real = os.path.realpath(source)
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()
    return packed_home() / f"{os.path.basename(real)[:LONGEST_STEM]}-{digest[:8]}{END}"


def copy_files() -> list[CopyFile]:
    """Return the copies with a readable header, sorted by name."""
    found = []
    for path in sorted(packed_home().glob(f"*{END}")):
        try:
            with path.open("rb") as file:
                contents, _ = read_contents(file)
            about = path.stat()
            found.append(CopyFile(path, Path(contents["origin"]["path"]), about.st_size, about.st_mtime))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def write_contents(file: IO[bytes], contents: dict[str, Any]) -> None:
    """Append the JSON and the trailer."""
    text = json.dumps(contents).encode()
    file.write(text + TRAILER.pack(hashlib.sha256(text).digest(), len(text), MAGIC))


def read_contents(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Return the JSON and the size of the bytes before it. Raises: OSError; ValueError if it is damaged."""
    size = file.seek(0, os.SEEK_END)
    if size < TRAILER.size:
        raise ValueError("it is too short")
    file.seek(size - TRAILER.size)
    digest, length, magic = TRAILER.unpack(file.read(TRAILER.size))
    start = size - TRAILER.size - length
    if magic != MAGIC or start < 0:
        raise ValueError("it does not end as a copy does")
    file.seek(start)
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("what it says of itself is damaged")
    contents = json.loads(text)
    if not isinstance(contents, dict):
        raise ValueError("what it says of itself is no object")
    return contents, start


def make_room(target: Path, num_bytes: int) -> None:
    """Delete copies without a source, then the least recently used ones, until num_bytes more fit.
    Raises: OSError if the disk has no room."""
    remove_left_over(target.parent)
    others = sorted((each for each in copy_files() if each.path != target), key=lambda each: each.used)
    total = num_bytes + sum(each.num_bytes for each in others)
    for each in others:
        if total > MOST_BYTES or not each.source.exists():
            each.path.unlink(missing_ok=True)
            total -= each.num_bytes
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes + SPARE_BYTES:
        raise OSError(f"{free / 1e6:,.0f} MB are free, and it takes {num_bytes / 1e6:,.0f} MB")
