"""Every kernel compiles for GPUs, and fits their shared memory: needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_BYTES = {86: 99 * 1024, 90: 227 * 1024}
"""By compute capability; 8.6 and 8.9 have the least of those with bf16."""

KERNELS = {
    "compact_kernel",
    "copy_kernel",
    "decode_kernel",
    "gather_kernel",
    "mixture_kernel",
    "norm_kernel",
    "reduce_kernel",
    "tile_kernel",
    "trig_norm_kernel",
    "write_kernel",
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [86, 90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in compiled} == KERNELS
    too_large = [(name, size) for name, size in compiled if int(size) > SHARED_BYTES[capability]]
    assert not too_large
