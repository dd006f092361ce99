"""`make gpu` without a GPU: its refusal, how outcomes are collected, what is run again, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic

import pytest
import torch
from typer.testing import CliRunner

from kvreclaim.bench import common
from scripts import gpu
from scripts.gpu_page import page
from scripts.gpu_parts import PYTEST, ROOT, Part, every_part
from scripts.outcomes import write

runner = CliRunner()
TESTS = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import pytest

def refuse():
    raise RuntimeError("CUDA error: an illegal memory access")

def test_passes():
    with (Path(__file__).parent / "runs").open("a") as file:
        file.write("x")

def test_breaks_the_device():
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=refuse)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)
    assert 1 == 2, "wrong | number"

def test_crashes():
    os.abort()

def test_is_skipped():
    assert "torch" not in sys.modules
    pytest.skip("needs two devices")
"""


def far() -> float:
    return monotonic() + 600


def small(path: Path) -> Part:
    """A part of one file, whose tests are named from its directory."""
    arguments = (*PYTEST, "--rootdir", str(path.parent), str(path))
    return Part(name="tests:small", arguments=arguments, limit_s=600)


def bench(code: str, **more) -> Part:
    """A benchmark whose last argument is the file to write."""
    return Part(name="bench:small", arguments=("-c", code), limit_s=600, tests=False, **more)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, parts: list[Part]) -> None:
    monkeypatch.setattr(gpu, "every_part", lambda: parts)
    monkeypatch.setattr(gpu, "require_gpu", lambda: None)
    monkeypatch.setattr(common, "commit", lambda: "one")


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    file = tmp_path / "test_small.py"
    file.write_text(TESTS)
    return file


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_ends_with_one_sentence(tmp_path: Path) -> None:
    result = runner.invoke(gpu.app, ["--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: torch {torch.__version__} finds no CUDA device")
    assert not (tmp_path / "out").exists()


def test_an_unknown_part_is_refused() -> None:
    result = runner.invoke(gpu.app, ["--parts", "tests:graphs,speed"])
    assert result.exit_code == 2
    assert "'speed'" in result.stderr


def test_every_test_has_its_outcome_whatever_its_process_does(tests: Path, tmp_path: Path) -> None:
    """A crash and a failure that breaks CUDA each end a process, and the next one goes on behind them."""
    found = gpu.run_part(small(tests), tmp_path / "out", far())
    assert found["state"] == "failed"
    assert found["collected"] == 4
    assert found["outcomes"] == {"passed": 1, "failed": 1, "crashed": 1, "skipped": 1}
    assert {bad["test"].partition("::")[2]: bad["why"] for bad in found["bad"]} == {
        "test_breaks_the_device": "AssertionError: wrong | number",
        "test_crashes": "SIGABRT",
    }
    assert found["skips"] == {"needs two devices": 1}
    assert (tests.parent / "runs").read_text() == "x"


def test_what_has_ended_is_not_run_again(tests: Path, tmp_path: Path) -> None:
    part, out = small(tests), tmp_path / "out"
    file = part.file(out, ".jsonl")
    out.mkdir()
    for name in ("passes", "breaks_the_device", "crashes"):
        write(file, test=f"test_small.py::test_{name}", outcome="passed", why="")
    write(file, test="test_small.py::test_is_skipped")
    with file.open("a") as cut:
        cut.write('\n{"test": "half a li')
    assert gpu.tally(file)["running"] == "test_small.py::test_is_skipped"
    found = gpu.run_part(part, out, far())
    assert (found["state"], found["outcomes"]) == ("passed", {"passed": 3, "skipped": 1})
    assert not (tests.parent / "runs").exists()


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "test_small.py"
    file.write_text("import nonesuch_module")
    found = gpu.run_part(small(file), tmp_path / "out", far())
    assert found["state"] == "failed"
    assert "nonesuch_module" in found["bad"][0]["why"]


def test_the_time_limit_ends_a_part() -> None:
    part = bench("import time; time.sleep(600)")
    assert gpu.run_process(part, (), Path("/dev/null"), monotonic()) is None


ROWS = '{"rows": [{"system": "kvreclaim-full", "context": 1024, "batch": 8, "tokens_per_s": 1234.5}]}'


def test_a_second_call_runs_what_has_not_ended(tmp_path: Path, monkeypatch) -> None:
    """Of a part that passed nothing is run again; a part that cannot run says why in one line."""
    marks = tmp_path / "marks"
    code = f"import sys; open({str(marks)!r}, 'a').write('x'); open(sys.argv[-1], 'w').write({ROWS!r})"
    parts = [
        bench(code),
        Part(name="vllm:pool", arguments=(), limit_s=1, missing=lambda: "vLLM is not installed"),
    ]
    as_on_a_gpu(monkeypatch, parts)
    options = ["--out", str(tmp_path / "out")]
    for _ in range(2):
        result = runner.invoke(gpu.app, [*options, "--limit-s", "600"])
        assert result.exit_code == 0, result.output
        assert marks.read_text() == "x"
        text = (tmp_path / "out" / "gpu.md").read_text()
        assert "- vllm:pool left out: vLLM is not installed" in text
        assert "| kvreclaim-full | 1,024 x 8 | 1,234.5 |" in text
    known = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert [(row["part"], row["state"]) for row in known["rows"]] == [
        ("bench:small", "passed"),
        ("vllm:pool", "left out"),
    ]
    (tmp_path / "out" / "gpu.json").write_text(json.dumps(known | {"commit": "another"}))
    refused = runner.invoke(gpu.app, options)
    assert refused.exit_code == 2
    assert "name another --out" in refused.stderr


def test_without_time_nothing_starts_and_the_status_says_so(tmp_path: Path, monkeypatch) -> None:
    as_on_a_gpu(monkeypatch, [bench("raise SystemExit(3)")])
    options = ["--out", str(tmp_path / "out"), "--limit-s"]
    assert runner.invoke(gpu.app, [*options, "1"]).exit_code == 1
    assert "bench:small stopped: the limit of 1 s came first" in (tmp_path / "out" / "gpu.md").read_text()
    assert runner.invoke(gpu.app, [*options, "600"]).exit_code == 1
    assert "bench:small failed: status 3: no output" in (tmp_path / "out" / "gpu.md").read_text()


def test_benchmarks_that_were_stopped_come_last() -> None:
    parts = [part for part in every_part() if part.name in ("tests:graphs", "bench:compact", "bench:write")]
    rows = {part.name: {"state": "stopped", "elapsed_s": 9.0} for part in parts[:2]}
    assert [part.name for part in gpu.in_turn(parts, rows)] == [
        "tests:graphs",
        "bench:write",
        "bench:compact",
    ]


def test_the_order_is_the_callers() -> None:
    chosen = [part.name for part in gpu.GpuPlan(parts=("bench:write", "tests")).chosen()]
    assert chosen[:2] == ["bench:write", "tests:graphs"]
    assert len(chosen) == 1 + sum(part.tests and part.name.startswith("tests:") for part in every_part())
    assert all(
        Path(ROOT, path).exists()
        for part in every_part()
        for path in part.arguments
        if path.startswith("tests/")
    )


def test_the_page_shows_what_failed_and_how_fast_kernels_are() -> None:
    tests = {
        "part": "tests:triton",
        "state": "stopped",
        "why": "a time limit came first",
        "elapsed_s": 399.6,
        "collected": 9,
        "outcomes": {"passed": 5, "failed": 1},
        "bad": [{"test": "tests/a.py::test_b[c|d]", "outcome": "failed", "why": "AssertionError: e"}],
        "skips": {"needs f": 2},
        "running": "tests/a.py::test_g",
    }
    figures = json.loads((ROOT / "benchmarks" / "results" / "kernels-amx.json").read_text())
    kernels = {"part": "bench:compact", "state": "passed", "why": "", "elapsed_s": 1.0}
    kernels |= {name: figures[name] for name in ("rows", "bandwidth")}
    text = page(common.report([], "make gpu"), [tests, kernels])
    assert "| tests:triton | stopped | 9 | 5 | 1 | 0 | 0 | 400 |" in text
    assert "- `tests/a.py::test_b[c|d]`: AssertionError: e" in text
    assert "- tests:triton stopped: a time limit came first (while `tests/a.py::test_g` ran)" in text
    assert "- tests:triton, 2 skipped: needs f" in text
    first = figures["rows"][0]
    assert f"{first['us']:,.0f} | {first['mib']:,.1f} | {first['gb_s']:,.1f}" in text
    assert text.count("\n## ") == 3
