"""`bench latent`: both ways are compared before they are timed, and the way taken is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvreclaim.bench import latent
from kvreclaim.bench.kernels import WrongKernelError
from kvreclaim.cli.main import app
from kvreclaim.ops.latent import UpProjection

COMMAND = ["bench", "latent", "--heads", "2", "--threads", "1", "--rounds", "1", "--kernels", "reference"]


def test_rows_of_the_command(tmp_path: Path) -> None:
    out = tmp_path / "latent.json"
    sizes = ["--contexts", "0,200", "--new-tokens", "4,40"]
    result = CliRunner().invoke(app, [*COMMAND, *sizes, "--kv-cache-dtype", "int8", "--json", str(out)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["context"], row["new_tokens"]) for row in rows] == [(0, 4), (0, 40), (200, 4), (200, 40)]
    assert [row["takes"] for row in rows] == ["absorbed", "expanded", "absorbed", "absorbed"]
    for row in rows:
        assert row["kv_cache_dtype"] == "int8"
        assert row["gain"] == pytest.approx(row["absorbed_ms"] / row["expanded_ms"])
        assert 0 <= row["error"] <= 2e-2


def test_a_wrong_way_is_not_timed(monkeypatch) -> None:
    finish = UpProjection.finish
    monkeypatch.setattr(UpProjection, "finish", lambda self, out: finish(self, out) * 1.1)
    monkeypatch.setattr(latent, "alternate", lambda *_: pytest.fail("timed although it is wrong"))
    plan = latent.LatentPlan(contexts=(0,), new_tokens=(20,), heads=2, kernels="reference")
    with pytest.raises(WrongKernelError, match="reference: absorbed and expanded attention differ by"):
        latent.run(plan)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--dtype", "float16", "must be one of"),
        ("--kv-cache-dtype", "int7", "int7"),
        ("--contexts", "a", "a"),
    ],
)
def test_bad_values_are_refused(option, value, reason) -> None:
    result = CliRunner().invoke(app, [*COMMAND, option, value])
    assert result.exit_code == 2
    assert reason in result.output
