"""Wheels by zig's clang, which brings the C library of any age and of either processor."""

from __future__ import annotations

import ctypes.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cmake
import ninja
import ziglang
from repack import read_wheel
from source import Source

GLIBC = "2.28"
PLATFORM = "manylinux_" + GLIBC.replace(".", "_")
MACHINES = ("x86_64", "aarch64")
# The programs themselves: their packages' scripts are lost inside the environments that pip builds in.
ZIG = Path(ziglang.__file__).with_name("zig")
CMAKE = Path(cmake.CMAKE_BIN_DIR) / "cmake"
NINJA = Path(ninja.BIN_DIR) / "ninja"


@dataclass(frozen=True)
class Toolchain:
    """zig as a C++ compiler for one machine."""

    machine: str
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, arguments in (
            ("c++", f"c++ -target {self.machine}-linux-gnu.{GLIBC}"),
            ("ar", "ar"),
            ("ranlib", "ranlib"),
        ):
            tool = self.folder / name
            tool.write_text(f'#!/bin/sh\nexec "{ZIG}" {arguments} "$@"\n')
            tool.chmod(0o755)

    @property
    def defines(self) -> dict[str, str]:
        tools = {"CMAKE_CXX_COMPILER": "c++", "CMAKE_AR": "ar", "CMAKE_RANLIB": "ranlib"}
        defines = {name: str(self.folder / tool) for name, tool in tools.items()}
        return defines | {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": self.machine,
            "CMAKE_MAKE_PROGRAM": str(NINJA),
        }


def build_kernels(source: Source, tools: Toolchain, build: Path) -> Path:
    """The kernels, which know nothing of Python, once for all of a machine's wheels, and their own tests.

    Returns: the folder with libkvr_kernels.a and kvr_tests.
    """
    options = {"KVR_PYTHON": "OFF", "KVR_TESTS": "ON", "CMAKE_BUILD_TYPE": "Release"} | tools.defines
    given = [f"-D{name}={value}" for name, value in options.items()]
    _run([str(CMAKE), "-G", "Ninja", "-S", str(source.folder / "csrc"), "-B", str(build), *given])
    _run([str(CMAKE), "--build", str(build)])
    return build


def build_wheel(
    sdist: Path, source: Source, tools: Toolchain, kernels: Path, python: Path, out: Path
) -> Path:
    """One wheel from the sdist, by the build backend, tagged for whatever it is compiled for."""
    config = tools.defines | {
        "KVR_KERNELS": str(kernels / "libkvr_kernels.a"),
        "KVR_COMMIT": source.commit,
        # nanobind's stable ABI names stderr without its header, which libc++ does not bring along.
        "CMAKE_CXX_FLAGS": f"-include stdio.h -ffile-prefix-map={out.parent}=.",
    }
    command = [str(python), "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(sdist)]
    command += [f"--config-settings=cmake.define.{name}={value}" for name, value in config.items()]
    # A wheel without its kernels is no release: the build fails rather than go on without a compiler.
    command += ["--config-settings=wheel.cmake=true"]
    suffix = f".cpython-{_version_of(python)}-{tools.machine}-linux-gnu.so"
    environment = source.environment | {
        "_PYTHON_HOST_PLATFORM": f"linux-{tools.machine}",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "PATH": f"{CMAKE.parent}{os.pathsep}{NINJA.parent}{os.pathsep}{os.environ['PATH']}",
    }
    _run(command, environment)
    (made,) = out.glob("*.whl")
    return made


def audit(wheel: Path, machine: str, out: Path, before: set[Path]) -> Path:
    """The wheel in `out` with the tag that its symbols keep; libgomp is torch's, so it is not brought along.

    auditwheel takes the name of a machine for its own only; elsewhere it finds the oldest tag itself.
    Raises: SystemExit if a symbol is newer than the tag.
    """
    plat = f"{PLATFORM}_{machine}" if machine == platform.machine() else "auto"
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", plat, "--only-plat"]
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    _run([*command, "--exclude", "libgomp.so.1", "--wheel-dir", str(out), str(wheel)], tools)
    (made,) = set(out.glob("*.whl")) - before
    if "manylinux" not in made.name or not any("/_native" in name for name in read_wheel(made)):
        raise SystemExit(f"{made.name} has no tag of manylinux, or no native module.")
    return made


def run_kernel_tests(kernels: Path) -> None:
    """The kernels' own tests. Raises: RuntimeError if one fails, or this system has no libgomp."""
    library = ctypes.util.find_library("gomp")
    if library is None:
        raise RuntimeError("the kernels' tests need libgomp.so.1, which this system lacks")
    done = subprocess.run([str(kernels / "kvr_tests")], capture_output=True, text=True, cwd=kernels.parent)
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _version_of(python: Path) -> str:
    code = "import sys; print('%d%d' % sys.version_info[:2])"
    return subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Quiet unless it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-8000:], sep="\n", file=sys.stderr)
        raise SystemExit(f"{' '.join(command[:4])} ... failed with {done.returncode}")
