"""Facts about build and machine, for bug reports."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

UNKNOWN = "unknown"
_BUILD_FILE = Path(__file__).parents[1] / "build.json"


@dataclass(frozen=True)
class NativeFacts:
    """Facts of the compiled extension."""

    compiler: str
    compiled_isas: tuple[str, ...]
    """Instruction sets that it has kernels for, simplest first."""
    isa: str
    """Instruction set of the kernels that run here."""


@dataclass(frozen=True)
class BuildFacts:
    """Facts of this installation."""

    version: str
    commit: str
    """Commit of the sources, as found when they were packed or compiled; UNKNOWN if neither was in a
    checkout."""
    python: str
    torch: str
    native: NativeFacts | None
    reason: str | None
    """Why there are no native kernels; None if there are."""

    def lines(self) -> list[str]:
        """The lines that `kvreclaim --version` prints."""
        if self.native is None:
            kernels = [f"native extension: not built: reference kernels ({self.reason})"]
        else:
            kernels = [
                f"native extension: {self.native.compiler}",
                f"  instruction sets built: {', '.join(self.native.compiled_isas)}",
                f"  used on this CPU: {self.native.isa}",
            ]
        return [
            f"kvreclaim {self.version}",
            f"commit: {self.commit}",
            f"Python: {self.python}",
            f"torch: {self.torch}",
            *kernels,
        ]


def build_facts() -> BuildFacts:
    """Facts of the installation that this process runs. Loads torch."""
    import torch

    from kvreclaim.ops.extension import native, unavailable_reason

    reason = unavailable_reason()
    module = native() if reason is None else None
    return BuildFacts(
        version=version("kvreclaim"),
        commit=_packed_commit() or (module.COMMIT if module is not None else "") or UNKNOWN,
        python=f"{platform.python_version()} ({platform.machine()})",
        torch=torch.__version__,
        native=None
        if module is None
        else NativeFacts(module.COMPILER, tuple(module.COMPILED_ISAS.split()), module.isa()),
        reason=reason,
    )


def _packed_commit() -> str:
    """Commit in the release's build file; empty in a checkout."""
    return str(json.loads(_BUILD_FILE.read_text())["commit"]) if _BUILD_FILE.exists() else ""
