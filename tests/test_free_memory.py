"""What this process may take, by the files of cgroups and by limits of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvreclaim.free_memory import _left_of_cgroups, free_host_memory_bytes

MIB = 1 << 20


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(f"{text}\n")


def test_version_2(tmp_path: Path) -> None:
    """The group's own limit and its parent's; the root has no files."""
    write(tmp_path / "proc", cgroup="0::/pod/box")
    limits = {"memory__stat": f"anon {50 * MIB}\ninactive_file {7 * MIB}", "memory__current": 60 * MIB}
    write(tmp_path / "mount" / "pod" / "box", memory__max="max", **limits)
    write(tmp_path / "mount" / "pod", memory__max=100 * MIB, **limits)
    assert list(_left_of_cgroups(tmp_path / "proc", tmp_path / "mount")) == [47 * MIB]


def test_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc", cgroup="5:cpu:/elsewhere\n4:memory:/box\n0::/")
    usage = {"memory__usage_in_bytes": 30 * MIB}
    stat = {"memory__stat": f"inactive_file 1\ntotal_inactive_file {2 * MIB}"}
    write(tmp_path / "mount" / "memory" / "box", memory__limit_in_bytes=64 * MIB, **usage, **stat)
    write(tmp_path / "mount" / "memory", memory__limit_in_bytes=2**63 - 4096, **usage, **stat)
    assert list(_left_of_cgroups(tmp_path / "proc", tmp_path / "mount")) == [36 * MIB]


def test_where_there_are_no_groups(tmp_path: Path) -> None:
    assert list(_left_of_cgroups(tmp_path, tmp_path)) == []


def test_never_more_than_the_machine_has() -> None:
    assert 0 < free_host_memory_bytes() <= psutil.virtual_memory().total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_limits_of_the_process(limit: str) -> None:
    """What is left is what can be had: a little less of it can be mapped, a little more cannot."""
    code = f"""
import mmap, resource
from kvreclaim.free_memory import free_host_memory_bytes
resource.setrlimit(resource.{limit}, (1 << 30, resource.RLIM_INFINITY))
left = free_host_memory_bytes()
assert 0 < left < 1 << 30, left
mmap.mmap(-1, left - (8 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
try:
    mmap.mmap(-1, left + (8 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
except OSError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr
