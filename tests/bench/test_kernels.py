"""`bench kernels`: every case runs on the reference, and a wrong kernel is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvreclaim.bench import kernels
from kvreclaim.bench.kernel_cases import (
    attention,
    column_sums,
    compact,
    gather,
    key_norms,
    mixture,
    standard,
    surrogate,
    triattention,
    write,
)
from kvreclaim.bench.kernel_shapes import Filled, KernelShape
from kvreclaim.bench.kernels import MachineSpeed, WrongKernelError, measure
from kvreclaim.ops import reference

SHAPE = KernelShape(70, 2, 32, 2, torch.float32, layers=2, turns=2)
CHUNK = KernelShape(70, 2, 32, 2, torch.float32, layers=2, queries=9)
CASES = [
    attention(SHAPE),
    attention(CHUNK),
    column_sums(SHAPE),
    column_sums(CHUNK),
    triattention(SHAPE),
    mixture(SHAPE),
    surrogate(SHAPE),
    key_norms(SHAPE),
    write(SHAPE),
    gather(SHAPE),
    compact(SHAPE, 40),
]
MACHINE = MachineSpeed(10.0, 10.0, 100.0)
RATIOS = {"fp16": 1.0, "int8": 1.91, "fp8_e4m3": 1.91, "int4": 3.556, "turboquant4": 3.657}
FORMATS = list(RATIOS)


def test_rows_of_every_case():
    rows, machine = kernels.run("reference", cases=CASES, machine=MACHINE, repeats=1)
    assert machine == MACHINE
    assert [row["op"] for row in rows] == [case.op for case in CASES]
    for row, case in zip(rows, CASES, strict=True):
        assert row["error"] == 0
        assert row["gb_s"] > 0
        assert row[f"{case.against}_share"] == pytest.approx(row["gb_s"] / 10)
        assert ("flop_share" in row) == (case.flops > 0)
    assert kernels.rows_table(rows, MACHINE).row_count == len(rows)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_a_wrong_kernel_is_refused(case, monkeypatch):
    def off(name):
        def wrong(*args, **kwargs):
            result = getattr(reference, name)(*args, **kwargs)
            return None if result is None else result * 1.01

        return wrong

    def half(cache, *args):
        cache.v.mul_(0.5)

    scored = ("paged_attention", "column_sums", "trig_norm_scores", "mixture_scores")
    scored = (*scored, "surrogate_scores", "token_norms")
    broken = {name: off(name) for name in scored} | {"write_kv": reference.write_kv, "compact": half}
    broken["gather_tokens"] = lambda *args: [x * 1.01 for x in reference.gather_tokens(*args)]
    if case.op == "write K/V":
        broken["gather_tokens"] = reference.gather_tokens
        broken["write_kv"] = lambda layer, k, v, slots: reference.write_kv(layer, v, k, slots)
    backend = SimpleNamespace(NAME="broken", allocate=reference.allocate, **broken)
    monkeypatch.setattr(kernels, "_backend", lambda *_: backend)
    monkeypatch.setattr(kernels, "_time", lambda *_: pytest.fail("timed although it is wrong"))
    with pytest.raises(WrongKernelError, match="broken"):
        kernels.run("auto", cases=[case], machine=MACHINE)


def test_a_result_that_is_not_finite_is_refused():
    nan = SimpleNamespace(**{name: getattr(reference, name) for name in ("allocate", "write_kv")})
    nan.NAME, nan.token_norms = "nan", lambda *_, **__: torch.full((2, 70), float("nan"))
    with pytest.raises(WrongKernelError, match="inf"):
        kernels.check(key_norms(SHAPE), nan)


def test_bytes_that_must_move():
    case = attention(SHAPE)
    assert case.moved == 2 * 2 * 70 * 2 * 32 * 4  # keys and values, sequences, tokens, KV heads, dims, bytes
    assert triattention(SHAPE).moved == case.moved // 2
    in_place = compact(KernelShape(40, 1, 32, 2, torch.float32), 40)
    assert in_place.moved == 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_timed_beside_bf16(name):
    shape = replace(SHAPE, dtype=torch.bfloat16)
    shapes = [replace(shape, kv_format=each) for each in ("bf16", name)]
    cases = [make(each) for make in (attention, gather) for each in shapes]
    rows, _ = kernels.run("reference", cases=cases, machine=MACHINE, repeats=2)
    assert [row["op"] for row in rows] == [case.op for case in cases]
    for base, row in (rows[:2], rows[2:]):
        assert (base["kv_cache_dtype"], row["kv_cache_dtype"]) == ("bf16", name)
        assert base["times_bf16"] == 1
        assert row["times_bf16"] == pytest.approx(base["us"] / row["us"])
        assert row["spread"] >= 1
    stored = [row["mib"] * 2**20 for row in rows[:2]]
    assert stored[0] / stored[1] == pytest.approx(RATIOS[name], abs=0.01)
    assert rows[3]["mib"] > rows[1]["mib"]  # and what the copies take


def test_formats_of_the_standard_cases():
    cases = list(standard(formats=("bf16", "int8")))
    for op in (
        "decode attention",
        "compact to 2,048",
        "write K/V",
        "mixture scores",
        "prefill column sums, 512 new",
    ):
        found = [case.shape for case in cases if case.op == op and case.shape.dtype == torch.bfloat16]
        half = len(found) // 2
        assert half > 0
        assert sorted(shape.kv_format for shape in found) == ["bf16"] * half + ["int8"] * half
    assert {case.shape.dtype for case in cases} == {torch.bfloat16}
    assert {case.shape.dtype for case in standard()} == {torch.bfloat16, torch.float32}


def test_caches_of_a_shape_hold_equal_tokens():
    filled = Filled(reference, SHAPE)
    k, v = filled.tokens(1, 0)
    assert torch.equal(filled.gather(1, 70), torch.stack([k.transpose(0, 1), v.transpose(0, 1)]))


def test_standard_cases_fit_the_machine():
    cases = list(standard())
    assert {case.op for case in cases} >= {"decode attention", "triattention scores", "mixture scores"}
    assert all(case.shape.layers * 2 * case.shape.side_bytes <= 5 * 2**30 for case in cases)


def test_bandwidth_is_measured():
    machine = measure(buffer_bytes=1 << 20, repeats=1)
    assert min(machine.read_gb_s, machine.copy_gb_s, machine.gflop_s) > 0


class Clock:
    """Events of CUDA that note when they are recorded."""

    def __init__(self, **_: object) -> None:
        pass

    def record(self) -> None:
        CALLS.append("event")

    def synchronize(self) -> None:
        CALLS.append("wait")

    def elapsed_time(self, end: object) -> float:
        return 4.0


CALLS: list[str] = []


def test_events_are_recorded_while_the_device_is_busy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    CALLS.clear()
    assert kernels.timed(lambda: CALLS.append("work"), "cuda") == 4e-3
    assert CALLS == ["work", "event", "work", "event", "wait"]


def test_what_cannot_be_captured_is_called_and_reported(monkeypatch):
    from kvreclaim.engine.execute import graphs

    def work() -> None:
        CALLS.append("work")

    def refuse(self, run):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.CudaCapture, "__call__", lambda self, run: run)
    replay, is_graph = kernels.captured(work)
    CALLS.clear()
    replay()
    assert (CALLS, is_graph) == (["work"], True)
    monkeypatch.setattr(graphs.CudaCapture, "__call__", refuse)
    assert kernels.captured(work) == (work, False)
