"""examples/small_card.py at toy size: answers in processes that get no more memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvreclaim import demo_model

SCRIPT = Path(__file__).parents[2] / "examples" / "small_card.py"
TOKENS, BUDGET, INTERVAL, LIMIT_MIB = 4096, 256, 128, 18
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4  # layers, keys and values, KV heads, head dim, bytes of fp32


@pytest.mark.slow("one and a half minutes; `make demo-24gb` is the whole")
def test_the_full_cache_ends_and_a_budget_goes_through(tmp_path: Path) -> None:
    """What a step and late imports take beside the pool is megabytes, here much of the limit."""
    sizes = ("--tokens", TOKENS, "--budget", BUDGET, "--limit-mib", LIMIT_MIB, "--pool-share", 0.4)
    files = ("--json", tmp_path / "card.json", "--out", tmp_path / "chart.png")
    setups = ("--setups", "pool for all of it", "full cache", "budget", "budget and int4")
    command = (sys.executable, SCRIPT, "--model", demo_model(), "--form", "fp32", *sizes, *files, *setups)
    subprocess.run([*map(str, command)], check=True)
    runs = {run["name"]: run for run in json.loads((tmp_path / "card.json").read_text())["runs"]}
    whole, full = runs["pool for all of it"], runs["full cache"]
    assert (whole["outcome"], whole["tokens"]) == ("out of memory", 0)
    assert "allocate" in whole["said"] or "are free" in whole["said"]
    assert full["outcome"] == "the one sequence has all blocks"
    assert full["tokens"] == full["num_blocks"] * 16 < TOKENS
    assert full["bytes_per_block"] == 16 * TOKEN_BYTES
    for run in (full, runs["budget"], runs["budget and int4"]):
        held = run["weight_bytes"] + run["peak_blocks"] * run["bytes_per_block"]
        assert held < run["peak_bytes"] <= LIMIT_MIB << 20
    for run in (runs["budget"], runs["budget and int4"]):
        assert (run["outcome"], run["tokens"]) == ("done", TOKENS)
        assert run["peak_blocks"] <= (BUDGET + INTERVAL) // 16 + 1
        assert run["blocks_freed"] >= (TOKENS - BUDGET) // 16 - INTERVAL // 16
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_it_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT], env={"KVRECLAIM_HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "run `kvreclaim fetch`" in done.stderr
