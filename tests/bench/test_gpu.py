"""`make gpu` without a GPU: every part at toy sizes, parts and tests that fail, and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import use_graphs

import kvreclaim
from kvreclaim.bench.common import Row
from kvreclaim.bench.systems.ours import KvreclaimSystem
from scripts.gpu import __main__ as gpu
from scripts.gpu import bars, engine, page
from scripts.gpu import tests as gpu_tests
from scripts.gpu.engine import HEADS
from scripts.gpu.session import Session

TESTS = """
import sys
from types import SimpleNamespace
import pytest

def refuse():
    raise RuntimeError("CUDA error: an illegal memory access")

def test_breaks_the_device():
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=refuse)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda)
    assert 1 == 2, "wrong | number"

def test_is_skipped():
    assert "torch" not in sys.modules
    pytest.skip("needs two devices")

def test_passes():
    pass
"""


def rows_of(out: Path) -> list[Row]:
    return [json.loads(line) for line in (out / "session.jsonl").read_text().splitlines()]


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="rehearses in Triton's interpreter")
def test_every_part_leaves_its_rows(tmp_path: Path) -> None:
    rows = {}
    for part in ("facts", "kernels", "decode", "peers", "serve"):
        Session(tmp_path, part, is_tiny=True).run()
        rows[part] = [row for row in rows_of(tmp_path) if row["part"] == part]
    assert not [row for row in rows_of(tmp_path) if "failed" in row]
    facts = {name: value for row in rows["facts"] for name, value in row.items()}
    assert min(facts[name] for name in page.CEILINGS.split()) > 0
    ops = [row for row in rows["kernels"] if "op" in row]
    assert len({row["op"] for row in ops}) == 8
    assert max(row["error"] for row in ops) < 1e-4
    copies = {row["copy"]: row["bus"] for row in rows["kernels"] if "copy" in row}
    assert copies == {"to host": "d2h_gb_s", "to blocks": "h2d_gb_s"}
    caches = ["full", "equal heads", "unequal heads", "full, kernels=auto"]
    steps = {row["label"]: row for row in rows["decode"] if "passes" in row}
    assert {label: row["passes"] > 0 for label, row in steps.items()} == {
        label: label in HEADS for label in caches
    }
    assert all(0 < row["ms_median"] <= row["ms_max"] for row in steps.values())
    assert [row["step"] for row in rows["decode"] if row.get("launches")] == caches
    assert [row["peer"].split(",")[0] for row in rows["peers"]] == ["torch SDPA", "transformers"]
    assert all(0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"] for row in rows["serve"])
    assert [row["label"] for row in rows["serve"]] == ["full", "knorm"]
    page.main(tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    titles = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    assert titles == ["Bars", *list(page.TABLES)[:-1]]
    assert text.count("| 40 | 2 |") == 5
    assert "| - |" not in text.partition("### Kernels\n")[0]


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="rehearses in Triton's interpreter")
def test_decode_steps_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over graphs that call the model again: every step is replayed, and its row would list refusals."""
    replays, fails = [], False

    class Replaying(KvreclaimSystem):
        def __init__(self, *given: Any, kernels: str, **more: Any) -> None:
            super().__init__(*given, kernels="reference", **more)
            replays.append(use_graphs(self.llm, fails=lambda rows: fails)[1])

    monkeypatch.setattr(engine, "KvreclaimSystem", Replaying)
    Session(tmp_path, "decode", is_tiny=True).run()
    assert [row["refusals"] for row in rows_of(tmp_path) if "passes" in row] == [{}] * 4
    more = engine.WARM_UPS + 1  # with the step of the profile
    assert [found.replays for found in replays] == [2 + more + 2 * (12 + more), 2 + more]
    fails = True
    Session(tmp_path, "decode", is_tiny=True).run()
    last = [row for row in rows_of(tmp_path) if "passes" in row][-1]
    assert last["refusals"] == {"its capture failed: RuntimeError: cannot be captured": 2}


def test_parts_name_tests_that_are_there() -> None:
    """Also what only a GPU runs: a file that moved or a selection that matches nothing is found here."""
    paths = [*gpu_tests.FIRST, *gpu_tests.kernel_files(), *gpu_tests.ENGINE]
    command = [sys.executable, "-m", "pytest", *gpu_tests.PLUGINS[:4], "--collect-only", *paths]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert found == {path for path in paths if path.endswith(".py")}


def test_the_first_parts_have_their_time_and_the_last_gets_the_rest() -> None:
    *others, last = (limit for _, limit in gpu.PARTS.values())
    assert sum(others) + 60 < gpu.LIMIT_S < last


BAR_ROWS = [
    *({"part": part, "state": "passed"} for part in bars.TEST_PARTS),
    *(
        {"label": label, "context": context, "batch": batch, "ms_mean": ms, "tokens_per_s": 1e3 * batch / ms}
        | {"share": 0.7}
        for (label, context, batch), ms in {
            ("full", 2112, 32): 8.0,
            ("equal heads", 2112, 32): 10.0,
            ("unequal heads", 2112, 32): 11.0,
            ("full", 32_768, 16): 30.0,
            ("equal heads", 32_768, 16): 7.0,
            ("unequal heads", 32_768, 16): 8.0,
        }.items()
    ),
    *(
        {"op": "decode attention", "kv_cache_dtype": form, "block_size": 16, "us": us, "share": 0.8}
        | {"context": 32_768, "batch": 16}
        for form, us in {"bf16": 300.0, "int8": 180.0, "int4": 150.0}.items()
    ),
    {"peer": "transformers", "context": 2112, "batch": 32, "tokens_per_s": 500.0},
    {"copy": "to host", "bus": "d2h_gb_s", "share": 0.9},
    {"copy": "to blocks", "bus": "h2d_gb_s", "share": 0.7},
]


def test_bars() -> None:
    """Two are not met; each is unmeasured without its rows, but for a test that failed."""
    found = {name: (value, met) for name, _, value, met in bars.bars(BAR_ROWS)}
    assert [value for value, _ in found.values()] == [
        "0",
        "0.8",
        "1.67",
        "2",
        "1.43",
        "1.1",
        "4.29",
        "3.75",
        "8",
        "0.7",
    ]
    assert [met for _, met in found.values()] == [
        "yes",
        "yes",
        "yes",
        "no",
        "yes",
        "yes",
        "yes",
        "no",
        "yes",
        "no",
    ]
    assert {(value, met) for _, _, value, met in bars.bars([])} == {("not measured", "")}
    failed = {"part": "first tests", "test": "a", "outcome": "failed"}
    assert bars.bars([failed])[0] == ["tests that failed", "<= 0", "1", "no"]
    for row in BAR_ROWS:
        less = [other for other in BAR_ROWS if other is not row]
        assert any(value == "not measured" for _, _, value, _ in bars.bars(less)), row


def test_docs_take_the_tables_between_their_marks() -> None:
    docs = page.PERFORMANCE.read_text()
    assert docs.count(page.BEGIN) == docs.count(page.END) == 1
    text = page.tables([{"part": "decode", "label": "full", "failed": "ValueError: a\nb", "text": ""}])
    written = page.into(docs, text)
    assert written.count("- decode, full: ValueError: a\n") == 1
    assert page.into(written, text) == written
    for mark, side in ((page.BEGIN, 0), (page.END, 2)):
        assert written.partition(mark)[side] == docs.partition(mark)[side]


def test_parts_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """One ends well, one fails, one takes too long; then the limit comes first."""
    monkeypatch.setattr(gpu, "PARTS", {"decode": ("", 300.0), "kernels": ("", 300.0), "peers": ("", 1.0)})
    process = gpu.run_process
    codes = iter(["", "print('a'); raise SystemExit('no such kernel')", "import time; time.sleep(600)"])
    monkeypatch.setattr(
        gpu, "run_process", lambda _, *more: process([sys.executable, "-c", next(codes)], *more)
    )
    assert gpu.run(tmp_path, 300.0, True) == 1
    assert [(row["part"], row["state"], row["why"]) for row in rows_of(tmp_path)] == [
        ("decode", "passed", ""),
        ("kernels", "failed", "status 1: no such kernel"),
        ("peers", "stopped", "its limit of 1 s came first"),
    ]
    assert "| peers | stopped | 1 | its limit of 1 s came first |" in (tmp_path / "gpu.md").read_text()
    capsys.readouterr()
    assert gpu.run(tmp_path, 5.0, True) == 1
    assert capsys.readouterr().out.startswith("decode: not run the limit of 5 s came first\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_ends_with_one_sentence(tmp_path: Path, capsys) -> None:
    assert gpu.run(tmp_path, 300.0, False) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert f"error: torch {torch.__version__} finds no CUDA device" in line


def test_every_test_has_its_row_whatever_its_process_does(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import nonesuch_module")
    options = ["-p", "no:benchmark", "-p", "scripts.gpu.tests", "--continue-on-collection-errors", "-n", "1"]
    options += ["--gpu-out", str(tmp_path), "--gpu-part", "kernel tests", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True)
    rows = rows_of(tmp_path)
    found = {row["test"].rpartition("::")[2]: row for row in rows if "crashed" not in row["why"]}
    assert {name: row["outcome"] for name, row in found.items()} == {
        "test_breaks_the_device": "failed",
        "test_is_skipped": "skipped",
        "test_other.py": "failed",
        "test_passes": "passed",
    }, done.stdout
    text = page.tables(rows)
    assert "| kernel tests | 1 | 2 | 1 |" in text
    assert "- `test_small.py::test_breaks_the_device`: AssertionError: wrong | number" in text
    assert "nonesuch_module" in found["test_other.py"]["why"]
    assert "- 1 x needs two devices" in text


def test_a_checkout_that_is_not_installed_gets_a_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "SITE", tmp_path / "site")
    monkeypatch.setattr(gpu, "WHEELS", tmp_path)
    monkeypatch.setattr(gpu, "is_installed", lambda package: package != "kvreclaim")
    gpu.prepare()
    (made,) = distributions(path=[str(tmp_path / "site")])
    assert (made.name, made.version) == ("kvreclaim", kvreclaim.__version__)
    assert gpu.environment(False)["PYTHONPATH"].startswith(os.pathsep.join([str(gpu.ROOT / "src"), ""]))
