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
from scripts.gpu.session import FUNCTIONS, Session, function

MEASURED = ("facts", "kernels", "decode", "peers", "serve")
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


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the parts that measure have left their rows."""
    out = tmp_path_factory.mktemp("gpu")
    for part in MEASURED:
        session = Session(out, part, is_tiny=True)
        function(part)(session)
        assert session.num_failed == 0, [row.get("text") for row in rows_of(out)]
    return out


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="rehearses in Triton's interpreter")
def test_every_part_leaves_its_rows(rehearsed: Path) -> None:
    rows = {part: [row for row in rows_of(rehearsed) if row["part"] == part] for part in MEASURED}
    facts = {name: value for row in rows["facts"] for name, value in row.items()}
    assert min(facts[name] for name in ("copy_gb_s", "bf16_tflop_s", "h2d_gb_s", "d2h_gb_s")) > 0
    assert len({row["op"] for row in rows["kernels"]}) == 8
    assert max(row["error"] for row in rows["kernels"]) < 1e-4
    steps = {row["label"]: row for row in rows["decode"] if "passes" in row}
    assert [row["passes"] > 0 for row in steps.values()] == [False, True, True]
    assert list(steps) == ["full", "equal heads", "unequal heads"]
    for row in steps.values():
        assert 0 < row["ms_median"] <= row["ms_max"]
        assert row["gb_s"] == pytest.approx(row["gb"] / row["ms_median"] * 1e3)
    assert [row["label"] for row in rows["decode"] if row.get("launches")] == [
        f"{label}, profile" for label in steps
    ]
    assert [row["peer"] for row in rows["peers"]] == [
        "torch SDPA, enable_gqa",
        "transformers",
        "transformers-cb",
    ]
    assert [row["ended"] == row["offered"] > 0 for row in rows["serve"]] == [True, True]


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="rehearses in Triton's interpreter")
def test_the_page_has_every_figure(rehearsed: Path) -> None:
    page.main(rehearsed)
    text = (rehearsed / "gpu.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("### ")]
    assert [title.split(",")[0] for title in titles] == [
        f"### {name}" for name in ("Ceilings", "Decode", "Kernels of one step", "Kernels", "Peers", "Serving")
    ]
    decode = text.partition("### Decode")[2].partition("###")[0]
    assert " - " not in decode
    assert decode.count("| 40 x 2 |") == 3


def test_docs_take_the_tables_between_their_marks() -> None:
    docs = page.PERFORMANCE.read_text()
    text = page.tables([{"part": "decode", "label": "full", "error": "ValueError: a\nb", "text": ""}])
    written = page.into(docs, text)
    assert written.count("- decode, full: ValueError: a\n") == 1
    assert page.into(written, text) == written
    assert written.partition(page.BEGIN)[0] == docs.partition(page.BEGIN)[0]
    assert written.partition(page.END)[2] == docs.partition(page.END)[2]


def test_parts_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """One ends well, one fails, one takes too long; then the limit comes first."""
    codes = {
        "decode": "",
        "kernels": "print('a'); raise SystemExit('no such kernel')",
        "peers": "import time; time.sleep(600)",
        "serve": "",
    }
    monkeypatch.setattr(gpu, "PARTS", {**dict.fromkeys(codes, 300.0), "peers": 1.0})
    monkeypatch.setattr(gpu, "part_command", lambda part, *_: [sys.executable, "-c", codes[part]])
    assert gpu.run(tmp_path, 300.0, True) == 1
    assert [(row["part"], row["state"], row["why"]) for row in rows_of(tmp_path)] == [
        ("decode", "passed", ""),
        ("kernels", "failed", "status 1: no such kernel"),
        ("peers", "stopped", "its limit of 1 s came first"),
        ("serve", "passed", ""),
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
    found = {row["test"].rpartition("::")[2]: row for row in rows if "crashed" not in row.get("why", "")}
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


def test_parts_are_known() -> None:
    assert list(gpu.PARTS) == list(FUNCTIONS)
    assert all(callable(function(part)) for part in FUNCTIONS)
