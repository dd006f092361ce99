"""`bench memory` on the demo model, and what all benchmarks share."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from kvreclaim import demo_model
from kvreclaim.bench import memory
from kvreclaim.bench.common import alternate
from kvreclaim.bench.host_steps import PartTimer, timers
from kvreclaim.cli.main import app

runner = CliRunner()
COMMON = ("--model", demo_model(), "--threads", 1, "--dtype", "float32")


def run(tmp_path, *arguments):
    file = tmp_path / "result.json"
    result = runner.invoke(app, ["bench", *map(str, arguments), "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert set(report) >= {"machine", "versions", "commit", "command", "rows"}
    return report["rows"], result.output


def test_memory_counts_requests_at_once(tmp_path):
    options = ("--requests", 3, "--prompt", 64, "--output", 128, "--pool", 1, "--interval", 16)
    rows, _ = run(tmp_path, "memory", *COMMON, *options, "--budget", 48, "--policies", "full,streaming_llm")
    full, compressed = rows
    assert full["fits_at_once"] == 1
    assert full["preemptions"] > 0
    assert compressed["fits_at_once"] == full["num_blocks"] // compressed["blocks_per_request"] > 1
    assert compressed["ratio_to_full"] == compressed["fits_at_once"]
    assert compressed["preemptions"] == 0
    assert compressed["peak_blocks"] <= compressed["num_blocks"]
    assert memory.memory_table(rows).row_count == 2


def test_rounds_begin_with_another_run_each_time():
    order = []
    runs = {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}
    results = alternate(runs, 3)
    assert "".join(order) == "abcbcacab"
    assert all(len(values) == 3 for values in results.values())


def test_timers_are_taken_off_again():
    class Owner:
        def work(self):
            return 1

    owner, clock = Owner(), PartTimer()
    with timers(clock, [(owner, "work", "part")]):
        assert owner.work() == 1
    assert clock.take()["part"] > 0
    assert "work" not in vars(owner)
    assert clock.take() == {}
