"""Kernel speed as a share of the machine's: bytes that must move over the time they take.

Every case is first compared with the reference on the same keys and values, stored in the same format;
nothing is timed while one differs. Calls rotate through several layers (and sequences, if an op takes one),
so that their data has left the near caches, as in a decode step. One op at one shape in several formats is
timed in alternation, round by round, so that other load on the machine affects all equally; `times_bf16` is
the ratio of the medians. The machine's bandwidth is measured before and after, and the better figure counts:
other load only lowers it.

On CUDA the calls are captured in a graph and timed by events, so that a row shows the kernel's time;
`host_us` is the host's time to launch it from Python, outside graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kvreclaim.bench.common import Columns, Row, alternate, seconds, sheet, spread
from kvreclaim.bench.kernel_cases import KernelCase, standard
from kvreclaim.bench.kernel_shapes import Filled, KernelShape
from kvreclaim.errors import KVReclaimError
from kvreclaim.ops import reference
from kvreclaim.ops.backend import Backend, Need, choose_backend

TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 2e-4}
"""Largest difference from the reference over the reference's largest value."""
MIN_SLICE_S = 0.02
GRAPH_CALLS = 10
"""Calls in a CUDA graph, at least."""
BASE = "bf16"
COLUMNS: Columns = {
    "op": "{op} ({kernels})",
    "tokens": "{context:,} x {batch}",
    "D": "{head_dim}",
    "dtype": "{dtype}",
    "K/V": "{kv_cache_dtype}",
    "µs": "{us:,.0f}",
    "MiB": "{mib:,.1f}",
    "GB/s": "{gb_s:,.1f}",
    "of read": "{read_share:.0%}",
    "of copy": "{copy_share:.0%}",
    "of FLOP/s": "{flop_share:.0%}",
    "x bf16": "{times_bf16:.2f}",
}


class WrongKernelError(KVReclaimError, RuntimeError):
    """A kernel's result differs from the reference's."""


def run(
    kernels: str = "auto",
    *,
    device: str = "cpu",
    cases: Iterable[KernelCase] | None = None,
    machine: MachineSpeed | None = None,
    repeats: int = 5,
) -> tuple[list[Row], MachineSpeed]:
    """Check every case, then time every case. Raises: WrongKernelError naming the first that differs.

    Returns: rows with op, shape, kv_cache_dtype, us (of one layer's call; of all layers for compaction),
        gb_s, read_share or copy_share, gflop_s and flop_share if arithmetic counts, error, spread over the
        rounds, times_bf16 if bf16 was timed as well; and the machine's speed.
    """
    chosen = list(standard(device) if cases is None else cases)
    errors = {case: check(case, _backend(kernels, case)) for case in chosen}
    before = machine or measure(device=device)
    rows: dict[KernelCase, Row] = {}
    for group in _groups(chosen):
        rows |= _time(group, kernels, repeats)
    best = before.better(machine or measure(device=device))
    return [_share(rows[case] | {"error": errors[case]}, case, best) for case in chosen], best


def _groups(cases: Sequence[KernelCase]) -> list[list[KernelCase]]:
    """Group the cases that differ only in their format."""
    found: dict[Any, list[KernelCase]] = {}
    for case in cases:
        found.setdefault((case.op, replace(case.shape, kv_format="auto")), []).append(case)
    return list(found.values())


def _backend(kernels: str, case: KernelCase) -> Backend:
    shape = case.shape
    need = Need(shape.facts(), shape.block_size, shape.dtype, torch.device(shape.device), shape.format)
    return choose_backend(kernels, need).backend


def check(case: KernelCase, backend: Backend) -> float:
    """Largest difference from the reference, over the reference's largest value, on one layer.

    Raises: WrongKernelError above the tolerance, or for a result that is not finite.
    """
    error = _error(case, backend)
    allowed = TOLERANCES[case.shape.dtype]
    if not error <= allowed:
        raise WrongKernelError(
            f"{backend.NAME} {case.op} at {case.shape.describe()} is off by {error:.2e} of the reference's "
            f"largest value (allowed {allowed:.0e}); nothing was timed; run the tests of this kernel."
        )
    return error


def measured(case: KernelCase, kernels: str = "auto", repeats: int = 5) -> Row:
    """Return the row of one case, its `error` from the reference included, without judging it."""
    error = _error(case, _backend(kernels, case))
    return _time([case], kernels, repeats)[case] | {"error": error}


def _error(case: KernelCase, backend: Backend) -> float:
    small = replace(case.shape, layers=case.shape.layers if case.all_layers else 1)
    return _difference(_result(case, backend, small), _result(case, reference, small))


def _result(case: KernelCase, backend: Any, shape: KernelShape) -> Tensor:
    filled, layer = Filled(backend, shape), shape.layers - 1
    returned = case.run(filled, layer)
    found = case.result(filled, layer) if case.result is not None else returned
    assert found is not None, f"{case.op} neither returns a tensor nor says where its result is"
    return found.float()


def _difference(got: Tensor, expected: Tensor) -> float:
    if got.shape != expected.shape or not bool(got.isfinite().all()):
        return float("inf")
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _time(cases: list[KernelCase], kernels: str, repeats: int) -> dict[KernelCase, Row]:
    """Time cases in alternation. Returns: rows with medians."""
    backends = {case: _backend(kernels, case) for case in cases}
    slices = {case: _slice(case, backend) for case, backend in backends.items()}
    rounds = alternate({case: call_s for case, (call_s, _) in slices.items()}, repeats)
    call_s = {case: median(times) for case, times in rounds.items()}
    base = next((call_s[case] for case in cases if case.shape.format.name == BASE), None)
    rows = {}
    for case, times in rounds.items():
        rows[case] = _row(case, backends[case], call_s[case]) | {"spread": spread(times)} | slices[case][1]
        if base is not None and len(cases) > 1:
            rows[case]["times_bf16"] = base / call_s[case]
    return rows


def _slice(case: KernelCase, backend: Backend) -> tuple[Callable[[], float], Row]:
    """Seconds of one call (one layer's, if it does one at a time) at each call, and facts for its row."""
    shape, filled = case.shape, Filled(backend, case.shape)
    layers = 1 if case.all_layers else shape.layers
    calls = layers * shape.turns

    def call(times: int) -> None:
        for filled.turn in list(range(shape.turns)) * times:
            for layer in range(layers):
                case.run(filled, layer)

    first = median_time(lambda: call(1), shape.device, 1)
    if not is_cuda(shape.device):
        times = max(1, int(MIN_SLICE_S / first))
        return lambda: timed(lambda: call(times), shape.device) / times / calls, {}
    times = -(-GRAPH_CALLS // calls)
    host_us = seconds(lambda: call(times)) / times / calls * 1e6
    work, is_graph = captured(lambda: call(times))
    return lambda: timed(work, shape.device) / times / calls, {"host_us": host_us, "graph": is_graph}


def captured(work: Callable[[], object]) -> tuple[Callable[[], object], bool]:
    """Return a replay of the work's CUDA graph and True; or the work and False if it can't be captured."""
    from kvreclaim.engine.execute.graphs import CudaCapture

    def run() -> Tensor:
        work()
        return torch.empty(0)

    try:
        return CudaCapture()(run), True
    except RuntimeError:
        return work, False


def _row(case: KernelCase, backend: Backend, call_s: float) -> Row:
    shape = case.shape
    return {
        "op": case.op,
        "kernels": backend.NAME,
        "context": shape.context,
        "batch": shape.batch,
        "head_dim": shape.head_dim,
        "kv_heads": shape.kv_heads,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "kv_cache_dtype": shape.format.name,
        "block_size": shape.block_size,
        "us": call_s * 1e6,
        "mib": case.moved / 2**20,
        "gb_s": case.moved / call_s / 1e9,
    }


def _share(row: Row, case: KernelCase, machine: MachineSpeed) -> Row:
    """Add the shares of the machine's bandwidth and arithmetic to a row."""
    peak = machine.read_gb_s if case.against == "read" else machine.copy_gb_s
    row = row | {f"{case.against}_share": row["gb_s"] / peak}
    if case.flops:
        gflop_s = case.flops / row["us"] / 1e3
        row |= {"gflop_s": gflop_s, "flop_share": gflop_s / machine.gflop_s}
    return row


def rows_table(rows: list[Row], machine: MachineSpeed) -> Table:
    title = (
        f"kernels; read {machine.read_gb_s:.1f}, copy {machine.copy_gb_s:.1f} GB/s, "
        f"{machine.gflop_s:.0f} GFLOP/s in fp32"
    )
    return sheet(title, COLUMNS, rows)


BUFFER_BYTES = 512 * 2**20
"""Many times the size of any cache."""


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """read, copy: GB/s (10^9 bytes; a copy counts what it reads and what it writes); flops: fp32 GFLOP/s."""

    read_gb_s: float
    copy_gb_s: float
    gflop_s: float

    def row(self) -> Row:
        return asdict(self)

    def better(self, other: MachineSpeed) -> MachineSpeed:
        """The larger figure of each kind."""
        return MachineSpeed(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def measure(*, device: str = "cpu", buffer_bytes: int = BUFFER_BYTES, repeats: int = 5) -> MachineSpeed:
    """Measure several ways to stream, each by its median, and take the best; threads are torch's."""
    source = torch.ones(buffer_bytes // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    read = min(median_time(way, device, repeats) for way in _readers(source))
    copy = min(median_time(way, device, repeats) for way in _copiers(source, target))
    return MachineSpeed(source.nbytes / read / 1e9, 2 * source.nbytes / copy / 1e9, _gflop_s(device, repeats))


def median_time(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Median seconds of one call, after one warm-up."""
    timed(work, device)
    return median(timed(work, device) for _ in range(repeats))


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of one call. On CUDA by events, after a warm-up call: the GPU is busy when the first event is
    recorded, so launches from the host do not count if they are faster than the work."""
    if not is_cuda(device):
        return seconds(work)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def _readers(source: Tensor) -> list[Callable[[], object]]:
    """Reductions over a large tensor in the types that torch reduces fastest; the cheapest wins."""
    floats = source.view(torch.float32).view(64, -1)
    return [
        lambda: source.sum(),
        lambda: floats.sum(),
        lambda: floats.amax(),
        lambda: torch.mv(floats, floats[0]),
    ]


def _copiers(source: Tensor, target: Tensor) -> list[Callable[[], object]]:
    return [lambda: target.copy_(source), lambda: torch.add(source, 1, out=target)]


def _gflop_s(device: str, repeats: int) -> float:
    """Measure a square fp32 matrix product that stays in the caches."""
    n = 1024
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    out = torch.empty_like(a)
    return 2 * n**3 / median_time(lambda: torch.mm(a, b, out=out), device, repeats) / 1e9
