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
    "packed_product_kernel",
    "reduce_kernel",
    "surrogate_kernel",
    "tile_kernel",
    "trig_norm_kernel",
    "unpack_kernel",
    "write_kernel",
}
NOT_OF_FORMATS = {"tile_kernel", "reduce_kernel", "packed_product_kernel", "unpack_kernel"}


def compiled(capability: int, what: list[str], cache: Path) -> dict[str, int]:
    """Names of kernels and the most shared memory that a variant of each takes."""
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(script), str(capability), *what],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sizes: dict[str, int] = {}
    for line in done.stdout.splitlines():
        name, size = line.split()
        sizes[name] = max(int(size), sizes.get(name, 0))
    return sizes


@pytest.mark.parametrize("capability", [86, 90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    sizes = compiled(capability, [], tmp_path)
    assert set(sizes) == KERNELS
    assert max(sizes.values()) <= SHARED_BYTES[capability], sizes


@pytest.mark.slow("a minute of compiling; plain caches are always compiled for")
def test_kernels_of_coded_and_latent_caches_compile(tmp_path: Path) -> None:
    sizes = compiled(86, ["formats"], tmp_path)
    assert set(sizes) == (KERNELS | {"encode_kernel"}) - NOT_OF_FORMATS
    assert max(sizes.values()) <= SHARED_BYTES[86], sizes
