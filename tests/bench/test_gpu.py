"""`make gpu` without a GPU: every part at toy sizes, parts and tests that fail, and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

import kvreclaim
from kvreclaim.bench.common import Row
from scripts.gpu import __main__ as gpu
from scripts.gpu import page
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
    assert len({row["op"] for row in rows["kernels"]}) == 8
    assert max(row["error"] for row in rows["kernels"]) < 1e-4
    caches = ["full", "equal heads", "unequal heads"]
    steps = {row["label"]: row for row in rows["decode"] if "passes" in row}
    assert {label: row["passes"] > 0 for label, row in steps.items()} == dict.fromkeys(caches, True) | {
        "full": False
    }
    assert all(0 < row["ms_median"] <= row["ms_max"] for row in steps.values())
    assert [row["step"] for row in rows["decode"] if row.get("launches")] == caches
    assert [row["peer"].split(",")[0] for row in rows["peers"]] == [
        "torch SDPA",
        "transformers",
        "transformers-cb",
    ]
    assert all(0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"] for row in rows["serve"])
    assert [row["label"] for row in rows["serve"]] == ["full", "knorm"]
    page.main(tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    titles = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    assert titles == list(page.TABLES)[:-1]
    assert text.count("| 40 | 2 |") == 5
    assert "| - |" not in text.partition("### Kernels\n")[0]


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
