"""The story of a card that is too small: chains in processes that get no more memory, at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvreclaim import demo_model
from kvreclaim.cli.main import app
from kvreclaim.demo.card.main import present, run_card
from kvreclaim.demo.card.plan import MIB, CardPlan, ChainSetup
from kvreclaim.model_paths import real_gguf

CARD = CardPlan(
    model=demo_model(),
    num_tokens=6144,
    card_bytes=18 * MIB,
    utilization=1.0,
    runtime_bytes=0,
    pool_share=0.4,  # what a step and late imports take beside is megabytes, here much of the card
    budget=256,
    threads=1,
    setups=(
        ChainSetup("pool for all of it", kv_cache_dtype="fp32", whole_pool=True),
        ChainSetup("full cache", kv_cache_dtype="fp32"),
        ChainSetup("budget", kv_cache_dtype="fp32", policy="lagkv"),
        ChainSetup("budget and int4", kv_cache_dtype="int4", policy="lagkv"),
    ),
)
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4  # layers, keys and values, KV heads, head dim, bytes of fp32


def test_the_full_cache_ends_and_a_budget_goes_through(tmp_path: Path) -> None:
    console = Console(record=True, width=140)
    report = run_card(CARD, console, command="test")
    whole, full, budget, both = report.runs
    assert (whole.outcome, whole.tokens) == ("out of memory", 0)
    assert "allocate" in whole.said or "are free" in whole.said
    assert full.outcome == "pool full", full.said
    assert full.tokens == full.num_blocks * 16 < CARD.num_tokens
    assert (budget.outcome, both.outcome) == ("done", "done")
    for run in (full, budget, both):
        assert 0 < run.weight_bytes < run.peak_bytes <= CARD.limit_bytes
        assert run.weight_bytes + run.peak_blocks * run.bytes_per_block < run.peak_bytes
    assert full.bytes_per_block == 16 * TOKEN_BYTES
    for run in (budget, both):
        assert run.tokens == CARD.num_tokens
        assert run.peak_blocks <= (CARD.budget + CARD.interval) // 16 + 1
        assert run.blocks_freed >= (CARD.num_tokens - CARD.budget) // 16 - CARD.interval // 16
        assert [sample.tokens for sample in run.samples] == sorted(sample.tokens for sample in run.samples)
    present(report, console, tmp_path / "chart.png", tmp_path / "card.json")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "card.json").read_text())["runs"]) == 4
    printed = console.export_text()
    assert f"full cache: ended as 'length' at {full.tokens:,} tokens" in printed


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo-24gb", "--model", str(tmp_path / "none.gguf")])
    assert result.exit_code != 0
    assert "pass the path of a .gguf file" in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path))
    assert real_gguf() is None
    result = CliRunner().invoke(app, ["demo-24gb"])
    assert result.exit_code != 0
    assert "run `kvreclaim fetch`" in result.output
