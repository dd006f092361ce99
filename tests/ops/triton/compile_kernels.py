"""Compile every kernel as its callers launch it, for a GPU that need not be there; run as a program.

    python compile_kernels.py 90      # compute capability 9.0; one shape and every coded format
    python compile_kernels.py 90 all  # more shapes and dtypes, minutes

Prints one line per compiled variant: name and bytes of shared memory. Launches become compilations, so
results are whatever was in memory.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))
from format_fill import Filled, Rig, fill
from paged_oracle import Ask, Shape, World, world

from kvreclaim.ops import reference
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.rope import RopeLayout
from kvreclaim.ops.triton import attention, scoring

SHAPES = [
    Shape(kv_heads=2, group=4, dim=128, dtype=torch.bfloat16),
    Shape(kv_heads=2, group=1, dim=80, v_dim=40, dtype=torch.float32),
    Shape(kv_heads=2, group=8, dim=64, dtype=torch.float16),
    Shape(kv_heads=2, group=3, dim=256, dtype=torch.bfloat16),
    Shape(kv_heads=2, group=4, dim=128, dtype=torch.float32),
    Shape(kv_heads=2, group=2, dim=256, dtype=torch.float32),
]
FEW = 1
CODED = [
    Shape(kv_heads=2, group=4, dim=128, dtype=torch.bfloat16),
    Shape(kv_heads=2, group=1, dim=80, v_dim=40, block_size=24),
    Shape(kv_heads=2, group=3, dim=256, dtype=torch.float16),
    Shape(kv_heads=2, group=2, dim=256),
]
LATENT = Shape(kv_heads=1, group=128, dim=576, v_dim=512, dtype=torch.bfloat16, latent=True)
"""DeepSeek-V3's."""
ASKS = [Ask(1, 700), Ask(1, 40), Ask(9, 40)]
HOW = {"softcap": 30.0, "window": 100, "sinks": torch.zeros(8)}


class NoDriver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_instead_of_launching(capability: int) -> None:
    triton.runtime.driver.set_active(NoDriver(capability))
    compile_or_run, seen = JITFunction.run, set()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compile_or_run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(self.__name__, kernel.metadata.shared, flush=True)
        return kernel

    JITFunction.run = run
    attention.dot_precision = scoring.dot_precision = lambda device: "tf32x3"


def launch_attention(w: World, **how: Any) -> None:
    kernels.paged_attention(w.q[0], w.cache, 0, w.batch, scale=0.1, **how)


def launch_the_rest(w: World) -> None:
    shape, cache = w.shape, w.cache
    ids = torch.from_numpy(w.batch.sequences[0].block_ids).long()
    bands = (shape.dim - shape.v_dim if shape.latent else shape.dim) // 2
    layout = RopeLayout(torch.ones(bands, dtype=torch.float64), start=shape.dim - 2 * bands)
    heads, centers = shape.heads, torch.zeros(shape.heads, 16, 5, shape.dim)
    kernels.trig_norm_scores(
        PagedTokens(cache, 0, ids, 700),
        torch.zeros(heads, 1, shape.dim),
        torch.zeros(heads, bands),
        layout,
    )
    kernels.mixture_scores(PagedTokens(cache, 0, ids, 700), centers, centers[:, :, 0], 0.1, slice(4, 600))
    kernels.key_norms(PagedTokens(cache, 0, ids, 700))
    kernels.gather_tokens(PagedTokens(cache, 0, ids, 700))
    if not cache.format.has_open_blocks:  # whose moves are PyTorch's
        kernels.copy_blocks(cache, [(1, 2)])
        kernels.compact(cache, torch.arange(0, 600, 2)[None, None], ids, ids[:19])
        k, v = (torch.zeros(3, shape.kv_heads, dim) for dim in (cache.head_dim, cache.v_head_dim))
        kernels.write_kv(cache, 0, k, v, torch.arange(3))


def launch_format(name: str, shape: Shape) -> None:
    """Attention in the dtype of the shape over a cache of this format."""
    w: Filled = fill(Rig(reference, FORMATS[name], shape.dtype), shape, ASKS)
    launch_attention(w)
    launch_the_rest(w)


def main() -> None:
    compile_instead_of_launching(int(sys.argv[1]))
    for shape in SHAPES if "all" in sys.argv else SHAPES[:FEW]:
        w = world(shape, ASKS)
        launch_attention(w)
        launch_the_rest(w)
    for name in ("fp8_e4m3", "int8", "int4", "turboquant4", "kivi4"):
        for shape in CODED if "all" in sys.argv else CODED[:FEW]:
            launch_format(name, shape)
    for name in FORMATS if "all" in sys.argv else ("bf16", "int4"):
        launch_format(name, LATENT)
    evicted, positions = (torch.zeros(1, 2, 40, dtype=dtype) for dtype in (torch.bool, torch.int32))
    masked = [replace(ask, evicted=evicted, slot_positions=positions) for ask in ASKS]
    launch_attention(world(SHAPES[0], masked), **HOW)


if __name__ == "__main__":
    main()
