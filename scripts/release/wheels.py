"""Wheels by zig's clang, which brings the C library of any age and of either processor."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from source import Source

GLIBC = "2.28"
PLATFORM = "manylinux_" + GLIBC.replace(".", "_")
MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Toolchain:
    """zig as a C++ compiler for one machine."""

    machine: str
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, arguments in (("c++", f"c++ -target {self.machine}-linux-gnu.{GLIBC}"), ("ar", "ar"), ("ranlib", "ranlib")):
            tool = self.folder / name
            tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {arguments} "$@"\n')
            tool.chmod(0o755)

    @property
    def defines(self) -> dict[str, str]:
        tools = {"CMAKE_CXX_COMPILER": "c++", "CMAKE_AR": "ar", "CMAKE_RANLIB": "ranlib"}
        defines = {name: str(self.folder / tool) for name, tool in tools.items()}
        return defines | {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": self.machine}


def build_kernels(source: Source, tools: Toolchain, build: Path) -> Path:
    """The kernels, which know nothing of Python, once for all of a machine's wheels, and their own tests.

    Returns: the folder with libkvr_kernels.a and kvr_tests.
    """
    bin_folder = Path(sys.executable).parent
    options = {"KVR_PYTHON": "OFF", "KVR_TESTS": "ON", "CMAKE_BUILD_TYPE": "Release"} | tools.defines
    options["CMAKE_MAKE_PROGRAM"] = str(bin_folder / "ninja")
    given = [f"-D{name}={value}" for name, value in options.items()]
    _run([str(bin_folder / "cmake"), "-G", "Ninja", "-S", str(source.folder / "csrc"), "-B", str(build), *given])
    _run([str(bin_folder / "cmake"), "--build", str(build)])
    return build


def build_wheel(sdist: Path, source: Source, tools: Toolchain, kernels: Path, python: Path, out: Path) -> Path:
    """One wheel from the sdist, by the build backend, tagged for whatever it is compiled for."""
    config = tools.defines | {
        "KVR_KERNELS": str(kernels / "libkvr_kernels.a"),
        "KVR_COMMIT": source.commit,
        "CMAKE_CXX_FLAGS": f"-ffile-prefix-map={out.parent}=.",
    }
    command = [str(python), "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(sdist)]
    command += [f"--config-settings=cmake.define.{name}={value}" for name, value in config.items()]
    # A wheel without its kernels is no release: the build fails rather than go on without a compiler.
    command += ["--config-settings=wheel.cmake=true"]
    suffix = f".cpython-{_version_of(python)}-{tools.machine}-linux-gnu.so"
    environment = source.environment | {
        "_PYTHON_HOST_PLATFORM": f"linux-{tools.machine}",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    _run(command, environment)
    (made,) = out.glob("*.whl")
    return made


def audit(wheel: Path, machine: str, out: Path) -> Path:
    """The wheel with the tag that its symbols keep; libgomp is torch's, so it is not brought along.

    Raises: subprocess.CalledProcessError if a symbol is newer than the tag.
    """
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", f"{PLATFORM}_{machine}", "--only-plat"]
    _run([*command, "--exclude", "libgomp.so.1", "--wheel-dir", str(out), str(wheel)])
    (made,) = out.glob(f"*{machine}.whl")
    return made


def _version_of(python: Path) -> str:
    code = "import sys; print('%d%d' % sys.version_info[:2])"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Quiet unless it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-8000:], sep="\n", file=sys.stderr)
        raise SystemExit(f"{' '.join(command[:4])} ... failed with {done.returncode}")
