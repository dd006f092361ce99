"""Files with copies of packed weights: where they are, what each says of itself, how many bytes they take.

A file has the matrices' bytes, each part on a page of its own, then JSON, then a trailer: the JSON's sha256
and length, and MAGIC.
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
"""How copies end, and how those that are being written begin."""
LONGEST_STEM = 100
MOST_BYTES = 64 << 30
"""Bytes of all copies together; those that were not used for longest go first."""
SPARE_BYTES = 1 << 30
"""Bytes of the disk that no copy takes."""


@dataclass(frozen=True, slots=True)
class CopyFile:
    """A copy on the disk.

    source: the model file that it was made of
    used:   seconds since 1970, when it was last read or written
    """

    path: Path
    source: Path
    num_bytes: int
    used: float

    @property
    def name(self) -> str:
        """By which `ls` and `rm` know it."""
        return f"packed/{self.path.name.removesuffix(END)}"


def copy_path(source: Path) -> Path:
    """Where the copy of a model file is: one for each path."""
    real = os.path.realpath(source)
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()
    return packed_home() / f"{os.path.basename(real)[:LONGEST_STEM]}-{digest[:8]}{END}"


def copy_files() -> list[CopyFile]:
    """All that say what they are of, by name."""
    found = []
    for path in sorted(packed_home().glob(f"*{END}")):
        try:
            with path.open("rb") as file:
                said, _ = read_contents(file)
            about = path.stat()
            found.append(CopyFile(path, Path(said["origin"]["path"]), about.st_size, about.st_mtime))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def write_contents(file: IO[bytes], said: dict[str, Any]) -> None:
    """Append JSON and trailer."""
    text = json.dumps(said).encode()
    file.write(text + TRAILER.pack(hashlib.sha256(text).digest(), len(text), MAGIC))


def read_contents(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """The JSON, and the bytes before it. Raises: ValueError where it is damaged, or another file; OSError."""
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
    said = json.loads(text)
    if not isinstance(said, dict):
        raise ValueError("what it says of itself is no object")
    return said, start


def make_room(target: Path, num_bytes: int) -> None:
    """Delete what nobody needs, or what was not used for longest, so that num_bytes more are within the
    limits. Raises: OSError where the disk has no room."""
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
