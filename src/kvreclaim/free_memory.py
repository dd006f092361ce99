"""Free memory of the machine that this process may still take."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
VERSION_2 = ("memory.max", "memory.current")
UNLIMITED = 1 << 60
"""Version 1 writes a number near 2 ** 63 where there is no limit."""


def free_host_memory_bytes() -> int:
    """Memory that the machine, this process's cgroups (containers) and its resource limits (ulimit -d,
    -v) all allow."""
    process = Path("/proc/self")
    left = [int(psutil.virtual_memory().available), *_left_of_cgroups(process), *_left_of_limits(process)]
    return max(0, min(left))


def _left_of_cgroups(process: Path, mount: Path = CGROUPS) -> Iterator[int]:
    """Bytes left in each group that this process is in, and those around it. Pages of files count as free."""
    try:
        lines = (process / "cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, names = mount / controllers, VERSION_1 if controllers else VERSION_2
        here = root / path.lstrip("/")
        for group in (here, *here.parents):
            if group.is_relative_to(root):
                yield from _left_of_group(group, *names)


def _left_of_group(group: Path, limit: str, usage: str) -> Iterator[int]:
    try:
        most = (group / limit).read_text(encoding="ascii").strip()
        if most == "max" or int(most) > UNLIMITED:
            return
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        idle = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        yield int(most) - int((group / usage).read_text(encoding="ascii")) + idle
    except OSError:  # the root of a mount has no such files
        return


def _left_of_limits(process: Path) -> Iterator[int]:
    for name, limit in (("VmData", resource.RLIMIT_DATA), ("VmSize", resource.RLIMIT_AS)):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            yield most - _status_bytes(process, name)


def _status_bytes(process: Path, name: str) -> int:
    """A line of /proc/self/status; 0 where there is none."""
    try:
        lines = (process / "status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
