"""`kvreclaim bench vllm --gpu-check`, rehearsed on vLLM's CPU build."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvreclaim.bench import vllm_check
from kvreclaim.bench.plans import VllmPlan


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"REQUESTS": 2, "PROMPT": 256, "OUTPUT": 48, "ROUNDS": 2}.items():
        monkeypatch.setattr(vllm_check, name, value)


def plan(python: Path) -> VllmPlan:
    return VllmPlan(gpu_check=True, python=python, policy="knorm", budget=160, interval=32, dtype="float32")


def test_a_page_of_three_sides() -> None:
    rows, versions = vllm_check.run(plan(Path(sys.executable)), Console(stderr=True))
    assert vllm_check.passed(rows), [row["verdict"] for row in rows]
    plain, equal, unequal = rows
    assert [row["equal"] for row in rows] == [vllm_check.REQUESTS] * 3
    assert [row["policy"] for row in rows] == [None, "knorm", "shares(knorm)"]
    assert equal["blocks_freed"] == unequal["blocks_freed"] > 0
    assert "compactions" not in plain
    assert "vllm" in versions
    page = vllm_check.check_page(rows)
    assert f"- card: {plain['card']}" in page
    assert page.count("| ok |") == 3


def test_what_fails_is_on_the_page(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such card >&2\nexit 3\n")
    python.chmod(0o755)
    rows, _ = vllm_check.run(plan(python), Console(stderr=True))
    assert not vllm_check.passed(rows)
    for row in rows:
        assert "exit code 3" in row["verdict"]
        assert row["log"] == "no such card\n"
    assert vllm_check.check_page(rows).count("no such card) |") == 3
