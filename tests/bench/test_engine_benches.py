"""`bench step`, `compress`, `memory`, `decode --growth` and `plot` on the demo model: what the files hold."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvreclaim import demo_model
from kvreclaim.bench import compress, memory, step, together
from kvreclaim.bench.common import alternate
from kvreclaim.bench.patches import PartTimer, timers
from kvreclaim.bench.plans import CompressPlan, DecodePlan
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


def test_step_splits_the_whole_step(tmp_path):
    rows, output = run(
        tmp_path, "step", *COMMON, "--contexts", 300, "--batches", 2, "--steps", 4, "--systems", "full"
    )
    (row,) = rows
    assert set(row["ms"]) == set(step.PARTS)
    assert min(row["ms"][part] for part in ("schedule", "batch", "model", "attention", "sample")) > 0
    assert row["ms"]["compress"] == 0
    assert "attention" in output


def test_step_takes_its_timers_off_again():
    class Owner:
        def work(self):
            return 1

    owner, clock = Owner(), PartTimer()
    with timers(clock, [(owner, "work", "part")]):
        assert owner.work() == 1
    assert clock.take()["part"] > 0
    assert "work" not in vars(owner)
    assert clock.take() == {}


def test_compress_splits_a_pass(tmp_path):
    options = ("--contexts", "300,400", "--budgets", "96,160", "--budget-context", 300)
    options += ("--together", 0)
    rows, _ = run(tmp_path, "compress", *COMMON, *options, "--budget", 96, "--interval", 16)
    assert len(rows) == 2 * 3
    for row in rows:
        assert row["passes"] >= 1
        assert row["pass_ms"] == pytest.approx(row["score_ms"] + row["select_ms"] + row["move_ms"])
        assert min(row["score_ms"], row["select_ms"], row["move_ms"], row["share"]) > 0
    assert compress.compress_table(rows).row_count == 6


@pytest.mark.parametrize("policy", ["query_mixture", "snapkv"])
def test_together_compresses_every_sequence(policy):
    base = DecodePlan(model=demo_model(), dtype="float32", threads=1, budget=48, interval=16)
    (row,) = together.run(CompressPlan(base, policies=(policy,), together=3, rounds=1))
    assert row["sequences"] == 3
    assert min(row["one_ms"], row["together_ms"], row["alone_ms"]) > 0
    assert row["ratio"] == row["together_ms"] / row["one_ms"]
    assert together.together_table([row]).row_count == 1


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


def test_growth_compares_two_lengths(tmp_path, monkeypatch):
    from kvreclaim.bench import growth

    measured = growth.run
    monkeypatch.setattr(growth, "run", lambda plan: measured(plan, (200, 600), batch=2))
    file = tmp_path / "growth.json"
    options = ("--contexts", 160, "--batches", 1, "--rounds", 1, "--no-verify", "--systems", "triattention")
    options += ("--budget", 96, "--interval", 8, "--growth", "--json", file)
    result = runner.invoke(app, ["bench", "decode", *map(str, (*COMMON, *options))])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["growth"]
    assert [row["context"] for row in rows] == [200, 600]
    assert rows[0]["ratio"] == 1


def test_plot_writes_an_image(tmp_path):
    rows = [
        {"system": name, "context": context, "batch": batch, "tokens_per_s": speed, "model": "m"}
        for name, speed in (("kvreclaim-full", 100.0), ("vllm", 50.0), ("transformers", None))
        for context in (1024, 8192)
        for batch in (1, 8)
    ]
    file, image = tmp_path / "decode.json", tmp_path / "charts" / "speed.png"
    file.write_text(json.dumps({"rows": rows}))
    result = runner.invoke(app, ["bench", "plot", str(file), "--out", str(image)])
    assert result.exit_code == 0, result.output
    assert image.read_bytes().startswith(b"\x89PNG")
    file.write_text("{}")
    refused = runner.invoke(app, ["bench", "plot", str(file), "--out", str(image)])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: ")


def test_rounds_begin_with_another_run_each_time():
    order = []
    runs = {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}
    results = alternate(runs, 3)
    assert "".join(order) == "abcbcacab"
    assert all(len(values) == 3 for values in results.values())


def test_chunks_compare_ways_with_the_whole_prompt(tmp_path):
    sizes = ("--chunk-tokens", 64, "--rounds", 2, "--reuse", "random(share=0.25,seed=1),none")
    rows, output = run(tmp_path, "chunks", *COMMON, *sizes)
    found = {row["way"]: row for row in rows}
    assert list(found) == ["whole", "cold", "random(share=0.25,seed=1)", "none"]
    assert {row["tokens"] for row in rows} == {4 * 64 + 64}
    assert (found["whole"]["ratio"], found["whole"]["reused"]) == (1, 0)
    shares = [found[way]["reused"] for way in ("random(share=0.25,seed=1)", "none")]
    assert 0.25 < shares[0] < shares[1] <= 0.8
    assert "tokens reused" in output


def test_prefill_compares_methods_with_dense(tmp_path):
    """On positions that YaRN stretches, where the prompt is longer than the model's context."""
    methods = "a_shape(first=256,sinks=64,local=128,block=64),pooled(first=256)"
    rows, output = run(
        tmp_path, "prefill", *COMMON, "--lengths", "600,9000", "--rounds", 1, "--methods", methods
    )
    assert [(row["length"], row["method"][:6]) for row in rows[:2]] == [(600, "dense"), (600, "a_shap")]
    assert len(rows) == 6
    assert rows[0]["read"] == rows[0]["ratio"] == 1
    assert rows[4]["read"] < rows[1]["read"] < 1
    assert {row["stretched"] for row in rows} == {9001 / 4096}
    assert "tokens read" in output
