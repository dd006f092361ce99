"""The machine's memory bandwidth and FLOP/s, measured in the same run as the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from statistics import median

import torch
from torch import Tensor

from kvreclaim.bench.common import Row, seconds

BUFFER_BYTES = 512 * 2**20
"""Many times any cache."""


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
    """The best of several ways to stream, each at its median; threads are torch's."""
    source = torch.ones(buffer_bytes // 8, dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    read = min(median_time(way, device, repeats) for way in _readers(source))
    copy = min(median_time(way, device, repeats) for way in _copiers(source, target))
    return MachineSpeed(source.nbytes / read / 1e9, 2 * source.nbytes / copy / 1e9, _gflop_s(device, repeats))


def median_time(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Median seconds of one call after one that does not count."""
    timed(work, device)
    return median(timed(work, device) for _ in range(repeats))


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of one call; a GPU has finished before the clock stops."""

    def finished() -> None:
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    return seconds(finished)


def _readers(source: Tensor) -> list[Callable[[], object]]:
    """Reductions over a large tensor in the types that torch reduces fastest; what computes least wins."""
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
