"""Temporary files and directories next to their targets. Each is locked while its process lives. The lock
distinguishes files in use from those of a killed process, also in containers that share a volume."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

PREFIX = ".kvreclaim-"
"""How all their names begin; random letters follow."""
ABANDONED_S = 3600.0
"""Age of what is left over on a file system without locks."""


@contextmanager
def temporary_directory(parent: Path, purpose: str) -> Iterator[Path]:
    """Make a directory in `parent` and remove it in the end. Left-overs of killed processes go first.

    Raises: OSError.
    """
    remove_left_over(parent)
    while True:
        made = Path(mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=parent))
        with _claimed(made) as is_ours:
            if not is_ours:  # another process took it for left over before it was locked
                continue
            try:
                yield made
            finally:
                shutil.rmtree(made, ignore_errors=True)
            return


def lock(fd: int) -> None:
    """Mark an open file of such a name as in use until it is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks
        return


def left_over(parent: Path) -> list[Path]:
    """Return the files and directories that killed processes left in `parent`, by name."""
    found = []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        with _claimed(path, ABANDONED_S) as is_ours:
            if is_ours:
                found.append(path)
    return found


def remove_left_over(parent: Path) -> None:
    """Remove all of them. What cannot be removed stays."""
    for path in left_over(parent):
        with _claimed(path, ABANDONED_S) as is_ours:
            if is_ours and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif is_ours:
                path.unlink(missing_ok=True)


@contextmanager
def _claimed(path: Path, least_age_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock of a path; False if another process holds it, or the path no longer exists.

    least_age_s: on file systems without locks, the path counts as free after so long
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.exists(path)
        except BlockingIOError:
            is_ours = False
        except OSError:
            is_ours = time.time() - os.fstat(fd).st_mtime >= least_age_s
        yield is_ours
    finally:
        os.close(fd)
