"""Facts about build and machine, for bug reports."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

UNKNOWN = "unknown"
_BUILD_FILE = Path(__file__).parents[1] / "build.json"


def build_facts() -> list[str]:
    """Return the lines that `kvreclaim --version` prints about the installation that this process runs. Loads
    torch.

    The commit is that of the sources, as found when they were packed or compiled; UNKNOWN if neither was in a
    checkout.
    """
    import torch

    from kvreclaim.ops.extension import native, unavailable_reason

    reason = unavailable_reason()
    module = native() if reason is None else None
    if module is None:
        kernels = [f"native extension: not built: reference kernels ({reason})"]
    else:
        kernels = [
            f"native extension: {module.COMPILER}",
            f"  instruction sets built: {', '.join(module.COMPILED_ISAS.split())}",
            f"  used on this CPU: {module.isa()}",
        ]
    return [
        f"kvreclaim {version('kvreclaim')}",
        f"commit: {_packed_commit() or (module.COMMIT if module is not None else '') or UNKNOWN}",
        f"Python: {platform.python_version()} ({platform.machine()})",
        f"torch: {torch.__version__}",
        *kernels,
    ]


def _packed_commit() -> str:
    """Commit in the release's build file; empty in a checkout."""
    return str(json.loads(_BUILD_FILE.read_text())["commit"]) if _BUILD_FILE.exists() else ""
