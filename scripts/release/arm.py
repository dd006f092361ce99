"""The aarch64 build under qemu: its kernels' own tests, and the wheel's module in an aarch64 Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from repack import read_wheel

TESTS_S = 600
"""Kernels' tests that begin later are left out: emulated, all of them take more than an hour."""
TEST_LIMIT_S = 1800
PYTHON = "python3.11"
PACKAGES = f"{PYTHON},libgomp1"
SUITE = "bookworm"
LIBRARIES = "usr/lib/aarch64-linux-gnu"


def why_not() -> str | None:
    """What is missing for a try here; None if nothing is."""
    if _emulator() is None:
        return "not tried: no qemu-aarch64-static here"
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        return "not tried: an aarch64 system is laid out by debootstrap, as root"
    return None


def make_system(folder: Path) -> Path:
    """Debian's packages for arm64 unpacked, none of whose scripts has run."""
    if not (folder / "usr" / "bin" / PYTHON).exists():
        shutil.rmtree(folder, ignore_errors=True)
        options = ["--arch=arm64", "--foreign", "--variant=minbase", f"--include={PACKAGES}"]
        _run("debootstrap", *options, SUITE, folder, limit_s=1200)
        for package in sorted((folder / "var/cache/apt/archives").glob("*.deb")):
            _run("dpkg-deb", "--extract", package, folder)
    return folder


def try_kernels(system: Path, tests: Path) -> str:
    """As many of the kernels' own tests as ten minutes take. Returns: their last line.

    Raises: RuntimeError if one fails.
    """
    line = _emulate(system, tests, str(TESTS_S)).splitlines()[-1]
    print(line, flush=True)
    return line


def try_module(system: Path, wheel: Path) -> str:
    """Load the module out of the wheel, without torch. Returns: the instruction set that it chose."""
    files = read_wheel(wheel)
    (name,) = (name for name in files if "/_native." in name)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, Path(name).name).write_bytes(files[name])
        code = f"import sys; sys.path.insert(0, {folder!r}); import _native; print(_native.isa())"
        return _emulate(system, system / "usr" / "bin" / PYTHON, "-c", code).strip()


def _emulator() -> str | None:
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def _emulate(system: Path, *command: str | Path) -> str:
    libraries = f"LD_LIBRARY_PATH={system / LIBRARIES}"
    return _run(str(_emulator()), "-L", system, "-E", libraries, *command, limit_s=TEST_LIMIT_S)


def _run(*command: str | Path, limit_s: float = 600) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout
