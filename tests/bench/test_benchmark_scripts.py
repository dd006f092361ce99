"""The cases of benchmarks/ at toy size: what they compare before they time it, and what their rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_gguf
from typer.testing import CliRunner

from benchmarks import caching, turns, vllm_turns
from benchmarks.__main__ import app
from kvreclaim import demo_model
from kvreclaim.bench import host_steps
from kvreclaim.memory import eviction_orders
from kvreclaim.ops import extension

runner = CliRunner()
COMMON = ("--model", demo_model(), "--threads", 1, "--dtype", "float32")


def run(tmp_path, *arguments):
    file = tmp_path / "result.json"
    result = runner.invoke(app, [*map(str, arguments), "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert set(report) >= {"machine", "versions", "commit", "command", "rows"}
    return report["rows"], result.output


def test_step_splits_what_the_host_does(tmp_path):
    options = ("--contexts", 300, "--batches", 2, "--steps", 4, "--budget", 96)
    rows, output = run(
        tmp_path, "step", *COMMON, *options, "--interval", 64, "--systems", "full,shares(surrogate)"
    )
    assert [row["system"] for row in rows] == ["kvreclaim-full", "kvreclaim-shares(surrogate)"]
    for row in rows:
        assert set(row["ms"]) == set(host_steps.PHASES)
        assert min(row["ms"].values()) > 0
        assert 0 < row["calls"] < 1000
    assert "build batch" in output


def test_compress_splits_a_pass(tmp_path):
    options = ("--contexts", "300,400", "--budgets", "96,160", "--budget-context", 300)
    rows, output = run(tmp_path, "compress", *COMMON, *options, "--budget", 96, "--interval", 16)
    assert len(rows) == 2 * 3
    for row in rows:
        assert row["passes"] >= 1
        assert row["pass_ms"] == pytest.approx(row["score_ms"] + row["select_ms"] + row["move_ms"])
        assert min(row["score_ms"], row["select_ms"], row["move_ms"], row["share"]) > 0
    assert output.count(" x 1 ") == 6


def test_turns_with_snapshots_compute_what_is_new(tmp_path):
    sizes = ("--turns", 4, "--scale", 0.05, "--num-tokens", 1500, "--chunk", 64, "--policy", "knorm")
    rows, output = run(tmp_path, "turns", *COMMON, *sizes, "--budget", 144, "--interval", 32)
    assert [row["setting"] for row in rows[::4]] == ["full", "compressed", "with snapshots"]
    for row in rows:
        assert row["computed"] == row["prompt"] - row["cached"]
        assert row["setting"] == "with snapshots" or row["snapshot"] == row["blocks_left"] == 0
    begun = [row for row in rows if row["snapshot"]]
    assert len(begun) >= 2
    assert all(row["computed"] <= row["new"] + 1 for row in begun)
    assert "with snapshots" in output


def test_turns_that_drop_tool_outputs(tmp_path):
    sizes = ("--turns", 5, "--scale", 0.05, "--num-tokens", 1500, "--chunk", 64, "--drop", 1)
    rows, _ = run(tmp_path, "turns", *COMMON, *sizes, "--settings", "full,cleared,dropped")
    full, cleared, dropped = rows[:5], rows[5:10], rows[10:]
    for turn in range(2, 5):
        assert dropped[turn]["computed"] <= dropped[turn]["new"] + 1 < cleared[turn]["computed"]
        assert dropped[turn]["prompt"] == full[turn]["prompt"] > cleared[turn]["prompt"]
        assert dropped[turn]["answer_blocks"] < full[turn]["answer_blocks"]


def test_turns_inside_vllm(tmp_path, monkeypatch):
    """Over a server that caches whole blocks and, with a policy, errs in each answer's first token."""

    class Server:
        def __init__(self, plan, model, setting, longest, num_blocks):
            self.errs, self.prompts = setting != "full", []

        wait = close = lambda self: None

        def metrics(self):
            return {vllm_turns.RUNNING: 1.0, vllm_turns.USAGE: 0.0}

        def next(self, prompt):
            shared = max((turns.num_shared(prompt, other) for other in self.prompts), default=0)
            is_first = len(prompt) - shared > 1
            self.prompts.append(prompt)
            return sum(prompt) % 97 + (self.errs and is_first), shared // 32 * 32

    monkeypatch.setattr(vllm_turns, "_server", Server)
    monkeypatch.setattr(vllm_turns, "_next", lambda server, prompt: server.next(prompt))
    (python := tmp_path / "python").touch()
    sizes = ("--turns", 4, "--scale", 0.05, "--num-tokens", 1500, "--settings", "full,with snapshots")
    rows, output = run(tmp_path, "vllm_turns", *COMMON, *sizes, "--vllm-python", python)
    assert [row["setting"] for row in rows] == ["full"] * 4 + ["with snapshots"] * 4
    for row in rows:
        assert row["prompt"] - row["cached"] == row["computed"] < row["new"] + 32
        assert row["agreement"] == (1 if row["setting"] == "full" else 1 - 1 / 5)
    assert "with snapshots" in output


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


def test_prompt_time_compares_policies_with_the_full_cache(tmp_path):
    options = ("--lengths", "400,600", "--chunk", 256, "--budgets", 0.3, "--rounds", 1)
    rows, output = run(tmp_path, "prompt_time", *COMMON, *options, "--policies", "auto,shares(kvzip)")
    assert [(row["length"], row["policy"], row["budget"]) for row in rows] == [
        (length, policy, 0.3) for length in (400, 600) for policy in ("auto", "shares(kvzip)")
    ]
    assert all(row["ratio"] == pytest.approx(row["seconds"] / row["full_s"]) for row in rows)
    assert "compressed / full" in output
    result = runner.invoke(app, ["prompt_time", *map(str, COMMON), "--lengths", "300"])
    assert result.exit_code == 2
    assert "0.2 of 300 tokens" in " ".join(result.output.split())


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason="the native extension is not there")
def test_rounding_of_logits(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    tiny_gguf.write(tmp_path / "tiny.gguf")
    options = ("--model", tmp_path / "tiny.gguf", "--threads", 1, "--tokens", 60, "--caches", "auto,int8")
    rows, _ = run(tmp_path, "rounding", *options, "--activations", "exact", "--dtype", "float32")
    assert [(row["cache"], row["activations"]) for row in rows] == [("auto", "exact"), ("int8", "exact")]
    assert rows[0]["rms"] < 1e-4 < rows[1]["rms"]  # nothing is rounded but int8's keys and values
    assert rows[0]["other_first"] == 0
    assert rows[0]["num_tokens"] == 52


def test_first_tokens_by_tier(tmp_path, tiny_dir):
    """The run itself asserts that all answers are equal, and that each prompt is found where its row says."""
    options = ("--model", tiny_dir("llama"), "--threads", 1, "--dtype", "float32", "--prompt", 160)
    rows, _ = run(tmp_path, "tiers", *options, "--rounds", 2)
    assert [row["case"] for row in rows] == list(caching.CASES)
    assert all(row["tokens"] == 160 and len(row["times_ms"]) == 2 for row in rows)


REQUESTS = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3], [5, 6, 7]]
"""An infinite cache hits 0 + 2 + 0 + 3 + 2 of 14 blocks.

Three blocks, least recently used: after [1 2 3] they stand 3 2 1 (3 goes first); [1 2 4] hits 2 and takes 3's
place: 4 2 1; [5 6] takes 4 and 2: 1 6 5; [1 2 3] hits 1 and takes 6, 5: 3 2 1; [5 6 7] takes all. 2 + 1 hits.
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = (
        {"timestamp": 1000 * i, "hash_ids": ids, "input_length": 512 * len(ids), "output_length": 1}
        for i, ids in enumerate(REQUESTS)
    )
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def test_prefix_hits_counted_by_hand(trace, tmp_path):
    rows, output = run(tmp_path, "prefix", "--trace", trace, "--blocks", 3, "--orders", "lru")
    assert [(row["num_blocks"], row["hits"], row["queries"]) for row in rows] == [(3, 3, 14), (None, 7, 14)]
    assert all(word in output for word in ("infinite", "0.5000"))


@pytest.mark.parametrize(("order", "expected"), [("lru", 1), ("slru", 1), ("priority", 1)])
def test_what_came_back_once_outlives_three_that_do_not(order, expected):
    """The cache has three blocks, of which slru protects none: a fifth is less than one."""
    assert caching.replay([[block] for block in (1, 1, 2, 3, 4, 1)], order, 3)["hits"] == expected


@pytest.mark.parametrize("order", eviction_orders())
def test_every_order_finds_everything_in_an_infinite_cache_and_accounts_for_each_block(order):
    infinite, small = (caching.replay(REQUESTS, order, num_blocks) for num_blocks in (14, 3))
    assert (infinite["hits"], infinite["evictions"], infinite["misses"]) == (7, 0, {"cold": 7})
    assert small["hits"] + sum(small["misses"].values()) == 14
    assert small["misses"]["evicted"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--blocks", "2"], "--blocks holds 2, but a request of the trace has 3 blocks"),
        (["--blocks", "many"], "--blocks is 'many'"),
        (["--orders", "fifo"], "an entry of --orders is 'fifo'; it must be one of lru, slru,"),
        (["--trace", "nonesuch"], "--trace 'nonesuch' cannot be read"),
    ],
)
def test_a_case_refuses_with_one_sentence(trace, arguments, sentence):
    result = runner.invoke(app, ["prefix", "--trace", str(trace), *arguments])
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
