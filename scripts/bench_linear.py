"""Linear layers with few rows: how much of the memory's read bandwidth each way of running them reaches.

    OMP_NUM_THREADS=1 python scripts/bench_linear.py --threads 1 --rows 1 8 32

Every cell is the median of alternating rounds over enough copies of the weights that no cache holds them:
GB/s of the bytes that this way reads, and, in brackets, the time of a streaming read of the bf16 weights
over its time. Ways that round weights or activations to 8 bits are marked *.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvreclaim.ops.extension import native, unavailable_reason

SHAPES = {
    "135M": [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)],
    "0.6B": [(1024, 1024), (1024, 2048), (1024, 3072), (3072, 1024), (1024, 151936)],
    "26M": [(512, 128), (512, 512), (512, 1536), (1536, 512), (512, 8192), (512, 32768)],
}
COLD_BYTES = 160 << 20
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """One way to multiply: prepare(weight bf16, rows) returns what runs, bytes_per_weight what it reads."""

    name: str
    prepare: Callable[[Tensor, int], Run | None]
    bytes_per_weight: int = 2
    dtype: torch.dtype = torch.bfloat16


def _torch(w: Tensor, rows: int) -> Run:
    return lambda x: functional.linear(x, w)


def _native(w: Tensor, rows: int) -> Run | None:
    if unavailable_reason() is not None:
        return None
    out = w.new_empty((rows, w.shape[0]))

    def run(x: Tensor) -> Tensor:
        native().linear(x, w, None, out)
        return out

    return run


def _transposed(w: Tensor, rows: int) -> Run:
    turned = w.t().contiguous()
    return lambda x: x @ turned


def _mv(w: Tensor, rows: int) -> Run | None:
    return (lambda x: torch.mv(w, x[0])[None]) if rows == 1 else None


def _weights_first(w: Tensor, rows: int) -> Run:
    return lambda x: (w @ x.t()).t()


def _onednn(w: Tensor, rows: int) -> Run:
    packed = torch.ops.mkldnn._reorder_linear_weight(w, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], None)


def _mkl(w: Tensor, rows: int) -> Run | None:
    if not torch.backends.mkl.is_available():
        return None
    packed = torch.ops.mkl._mkl_reorder_linear_weight(w, rows)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, w, None, rows)


def _widened(w: Tensor, rows: int) -> Run:
    return lambda x: functional.linear(x.float(), w.float()).to(x.dtype)


def _int8(w: Tensor, rows: int) -> Run:
    scale = w.float().abs().amax(1) / 127
    rounded = (w.float() / scale[:, None]).round().to(torch.int8)
    return lambda x: torch._weight_int8pack_mm(x, rounded, scale.to(x.dtype))


WAYS = (
    Way("native bf16", _native),
    Way("torch bf16", _torch),
    Way("torch bf16, weights transposed", _transposed),
    Way("torch bf16, mv", _mv),
    Way("torch bf16, weights first", _weights_first),
    Way("oneDNN bf16, packed", _onednn),
    Way("torch bf16 widened to fp32", _widened),
    Way("torch fp16", _torch, dtype=torch.float16),
    Way("native fp32", _native, 4, torch.float32),
    Way("torch fp32", _torch, 4, torch.float32),
    Way("oneDNN fp32, packed", _onednn, 4, torch.float32),
    Way("MKL fp32, packed", _mkl, 4, torch.float32),
    Way("int8 weights *", _int8, 1),
)


def time_reads(data: Tensor) -> float:
    """Seconds to read fp32 data once, by the fastest of torch's reading operations."""
    vector = torch.ones(4096)
    reads: list[Callable[[], Tensor]] = [lambda: data.sum(), lambda: torch.mv(data.view(-1, 4096), vector)]
    return min(_timed(read) for read in reads)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _prepared(ways: Sequence[Way], weights: list[Tensor], rows: int) -> dict[Way, list[Run]]:
    runs: dict[Way, list[Run]] = {}
    for way in ways:
        made = [way.prepare(w.to(way.dtype), rows) for w in weights]
        runs[way] = [run for run in made if run is not None]
    return {way: made for way, made in runs.items() if made}


def measure(
    ways: Sequence[Way], shape: tuple[int, int], rows: int, rounds: int
) -> tuple[float, dict[Way, float]]:
    """Read bandwidth in GB/s, and the seconds of one product for each way."""
    size_in, size_out = shape
    first = torch.randn(size_out, size_in).to(torch.bfloat16)
    weights = [first.clone() for _ in range(max(1, COLD_BYTES // first.nbytes))]
    data = torch.ones(COLD_BYTES // 4)
    x = torch.randn(rows, size_in)
    runs = _prepared(ways, weights, rows)
    reads: list[float] = []
    times: dict[Way, list[float]] = {way: [] for way in runs}
    for _ in range(rounds):
        reads.append(time_reads(data))
        for way, made in runs.items():
            given = x.to(way.dtype)
            times[way].append(_timed(lambda made=made, given=given: [run(given) for run in made]) / len(made))  # type: ignore[misc]
    return data.nbytes / statistics.median(reads) / 1e9, {w: statistics.median(t) for w, t in times.items()}


def print_table(ways: Sequence[Way], shape: tuple[int, int], row_counts: list[int], rounds: int) -> None:
    size_in, size_out = shape
    columns = [measure(ways, shape, rows, rounds) for rows in row_counts]
    print(f"\n| {size_in} -> {size_out} | " + " | ".join(f"{r} rows" for r in row_counts) + " |")
    print("|---|" + "---|" * len(row_counts))
    print("| read bandwidth | " + " | ".join(f"{bandwidth:.1f}" for bandwidth, _ in columns) + " |")
    for way in ways:
        cells = []
        for bandwidth, times in columns:
            if way not in times:
                cells.append("")
                continue
            rate = size_in * size_out / times[way] / 1e9
            cells.append(f"{rate * way.bytes_per_weight:.1f} ({rate * 2 / bandwidth:.2f})")
        print(f"| {way.name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--model", choices=sorted(SHAPES), nargs="+", default=sorted(SHAPES))
    parser.add_argument("--ways", nargs="+", help="only the ways whose names contain one of these words")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ways = [way for way in WAYS if not args.ways or any(word in way.name for word in args.ways)]
    print(
        f"torch {torch.__version__}, {args.threads} threads; GB/s read (share of the bf16 weights' read time)"
    )
    with torch.inference_mode():
        for model in args.model:
            for shape in SHAPES[model]:
                print_table(ways, shape, args.rows, args.rounds)


if __name__ == "__main__":
    main()
