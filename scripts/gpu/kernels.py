"""Ceilings of the device, and how close kernels come to them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from kvreclaim.bench import common
from kvreclaim.bench import kernels as bench
from kvreclaim.bench.kernel_cases import (
    KernelCase,
    attention,
    compact,
    key_norms,
    surrogate,
    triattention,
    write,
)
from kvreclaim.bench.kernel_shapes import KernelShape
from kvreclaim.ops.blocks_io import BlockCopies, bytes_per_block
from scripts.gpu.session import Session

SMI = ("nvidia-smi", "--format=csv,noheader", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.draw")
NO_GPU = 2


def facts(session: Session) -> None:
    """Versions; bandwidth of memory and of the bus, bf16 products; clocks under load."""
    if not session.is_tiny and not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} finds no CUDA device; run `make gpu` where there is one.")
        sys.exit(NO_GPU)
    head = common.report([], "make gpu" + " OPTIONS=--tiny" * session.is_tiny)
    session.add(**{name: value for name, value in head.items() if name != "rows"})
    device, is_tiny = session.device, session.is_tiny
    with session.trying(measurement="device"):
        if not is_tiny:
            known, memory = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()[1]
            session.add(processors=known.multi_processor_count, memory_gib=memory / 2**30)
    with session.trying(measurement="products"):
        n = 64 if is_tiny else 8192
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        session.add(bf16_tflop_s=2 * n**3 / bench.median_time(lambda: a @ b, device) / 1e12)
        if not is_tiny:  # the clocks under load
            session.add(smi=subprocess.run(SMI, capture_output=True, text=True, check=False).stdout.strip())
    with session.trying(measurement="memory"):
        session.add(**bench.measure(device=device, buffer_bytes=1 << (16 if is_tiny else 31)).row())
    with session.trying(measurement="bus"):
        host = torch.ones(1 << (16 if is_tiny else 28), dtype=torch.uint8, pin_memory=not is_tiny)
        there = torch.empty_like(host, device=device)
        up_s = bench.median_time(lambda: there.copy_(host, non_blocking=True), device)
        down_s = bench.median_time(lambda: host.copy_(there, non_blocking=True), device)
        session.add(h2d_gb_s=host.nbytes / up_s / 1e9, d2h_gb_s=host.nbytes / down_s / 1e9)


def kernels(session: Session) -> None:
    """Copies to the host tier and back. Then each op and shape: µs in a CUDA graph, GB/s, the host's
    µs, difference from the reference."""
    with session.trying(measurement="host tier"):
        host_tier(session)
    with torch.inference_mode():
        for case in cases(session):
            shape = case.shape
            about = {"op": case.op, "context": shape.context, "batch": shape.batch}
            with session.trying(**about, kv_cache_dtype=shape.format.name, block_size=shape.block_size):
                session.add(**bench.measured(case, "triton", 1 if session.is_tiny else 5))


def host_tier(session: Session) -> None:
    """GB/s of scattered blocks of a model's layers to neighbouring host slots, and back."""
    blocks, layers = (4, 2) if session.is_tiny else (256, 32)
    plane = (layers, blocks, 8, 16, 128)
    planes = torch.zeros(2, *plane, dtype=getattr(torch, session.dtype), device=session.device).unbind()
    size = (blocks, bytes_per_block(planes))
    slots = torch.zeros(size, dtype=torch.uint8, pin_memory=not session.is_tiny)
    ids, places = torch.randperm(blocks).tolist(), list(range(blocks))
    copies = BlockCopies(planes[0].device)
    moves = (
        ("to host", "d2h_gb_s", lambda: (copies.read(planes, ids, slots, places), copies.wait())),
        ("to blocks", "h2d_gb_s", lambda: (copies.write(planes, slots, places, ids), copies.wait())),
    )
    for copy, bus, run in moves:
        elapsed_s = bench.median_time(run, session.device)
        session.add(copy=copy, bus=bus, blocks=blocks, gb_s=slots.nbytes / elapsed_s / 1e9)


def cases(session: Session) -> Iterator[KernelCase]:
    """Attention of an 8B Llama's layer, then what a pass does to one sequence."""
    points = ((20, 2),) if session.is_tiny else ((2112, 32), (32_768, 16), (32_768, 1))
    heads = {"head_dim": 16, "kv_heads": 2} if session.is_tiny else {"head_dim": 128, "kv_heads": 8}
    more = {"dtype": getattr(torch, session.dtype), "layers": 1 if session.is_tiny else 2}
    steps = [KernelShape(*point, **heads, **more, device=session.device) for point in points]
    stored = ["int8"] if session.is_tiny else ["int8", "fp8_e4m3", "int8+int4", "int4", "turboquant4"]
    for size in (16, 64) if session.is_tiny else (16, 64, 128):
        yield from (attention(replace(step, block_size=size)) for step in steps)
    for form in stored:
        yield from (attention(replace(step, kv_format=form)) for step in steps)
    for form in ("auto", "int8"):
        yield from (attention(replace(step, kv_format=form, queries=5)) for step in steps)
        yield attention(replace(steps[-1], batch=1, kv_format=form, queries=9 if session.is_tiny else 512))
    context, budget = (20, 16) if session.is_tiny else (2176, 2048)
    one = replace(steps[0], context=context, batch=1, layers=1 if session.is_tiny else 32)
    yield compact(one, budget)
    for shape in dict.fromkeys((one, replace(steps[-1], batch=1))):
        yield from (surrogate(shape), triattention(shape), key_norms(shape))
    for tokens in (32, context):
        yield write(replace(one, context=tokens))
