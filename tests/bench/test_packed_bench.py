"""`kvreclaim bench packed` at toy size: what it checks, and what its rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import tiny_packed
from typer.testing import CliRunner

from kvreclaim.bench.packed import products
from kvreclaim.bench.packed.plan import FORMATS, PackedPlan
from kvreclaim.cli.main import app
from kvreclaim.ops import extension

pytestmark = pytest.mark.skipif(
    extension.unavailable_reason() is not None, reason="the native extension is not there"
)


def test_all_parts(tmp_path: Path) -> None:
    plain, packed = tiny.save_model("llama", tmp_path / "plain"), tmp_path / "awq"
    packed.mkdir()
    tiny_packed.write("awq", packed)
    command = ["bench", "packed", "--model", str(plain), "--packed", str(packed), "--threads", "1"]
    command += ["--size", "256", "--rows", "1,9", "--contexts", "16", "--batches", "1,2", "--steps", "2"]
    result = CliRunner().invoke(
        app, [*command, "--rounds", "1", "--tokens", "20", "--json", str(tmp_path / "out.json")]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    parts = {part: [row for row in rows if row["part"] == part] for part in ("products", "decode", "quality")}
    assert len(parts["products"]) == 2 * (1 + 2 * len(FORMATS))
    assert [row["times_bf16"] for row in parts["products"] if row["format"] == "bf16"] == [1, 1]
    awq = next(row for row in parts["products"] if row["format"] == "AWQ")
    assert awq["mib"] * 2**20 == pytest.approx(256 * 256 * (0.5 + 3 / 128))
    assert [(row["model"], row["batch"]) for row in parts["decode"]] == [
        (name, batch) for batch in (1, 2) for name in ("plain", "awq")
    ]
    whole, small = parts["decode"][:2]
    assert whole["times_bf16"] == 1
    assert small["weight_mb"] < whole["weight_mb"]
    fine, coarse = parts["quality"]
    assert abs(fine["kl"]) < coarse["kl"] < 1e-2
    assert fine["same_top_1"] == 1


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = products.packed_linear
    monkeypatch.setattr(products, "packed_linear", lambda *given, **how: right(*given, **how) * 1.1)
    with pytest.raises(AssertionError, match="AWQ, exact: off by"):
        products.check(PackedPlan(size=256))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "packed", "--size", "100"])
    assert result.exit_code != 0
    assert "pass a multiple of 256" in " ".join(result.output.split())
