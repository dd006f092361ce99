"""The demo measures what it says, and the project's own model shows what the method promises."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.cli.main import app
from kvreclaim.demo.main import run_demo, run_language_model, run_toy
from kvreclaim.demo.real import TASKS, RealPlan
from kvreclaim.demo.toy import POLICIES, DemoPlan, InPlace, emptied_blocks
from kvreclaim.eval.chain import ChainTask
from kvreclaim.eval.example import TokenKind, accuracy

SMALL = DemoPlan(
    fractions=(0.25,),
    num_scored=2,
    num_generated=3,
    num_load=4,
    interval=64,
    recent=32,
    task=ChainTask(num_prompt_tokens=400, num_trace_tokens=200),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder with the chart and the JSON file, and what was printed."""
    out = tmp_path_factory.mktemp("demo")
    console = Console(record=True, width=80, file=io.StringIO())
    run_demo((demo_model(), SMALL), None, console, out, out / "demo.json")
    return out, console.export_text()


@pytest.fixture(scope="module")
def figures(written):
    return json.loads((written[0] / "demo.json").read_text())


def by_policy(figures):
    return {run["policy"]: run for run in figures["runs"]}


def test_the_same_choice_frees_blocks_only_if_survivors_move(figures):
    run = by_policy(figures)["query_mixture"]
    assert run["tokens_evicted"] > 0
    assert run["reclaim_efficiency"] == 1.0
    assert run["freed_in_place"] < 0.05 * run["blocks_freed"]


def test_compression_lets_more_requests_run(figures):
    full, compressed = figures["load"]
    assert compressed["most_running"] > full["most_running"]
    assert len(compressed["blocks_over_time"]) < len(full["blocks_over_time"])


def test_the_report_is_written_and_printed(figures, written):
    out, text = written
    assert set(by_policy(figures)) == {"full", *POLICIES}
    assert (out / "blocks_over_time.png").read_bytes().startswith(b"\x89PNG")
    for policy, run in by_policy(figures).items():
        assert f"{run['lookup_accuracy']:.3f}" in next(line for line in text.splitlines() if policy in line)


def test_the_language_model_comes_first_and_the_toy_last(monkeypatch, tmp_path):
    ran = []
    for name in ("run_toy", "run_language_model"):
        monkeypatch.setattr(f"kvreclaim.demo.main.{name}", lambda *_, name=name: ran.append(name) or {})
    run_demo((demo_model(), SMALL), (tmp_path, RealPlan()), Console(quiet=True), tmp_path, None)
    assert ran == ["run_language_model", "run_toy"]


def test_query_mixture_keeps_the_evidence_at_a_tenth_of_the_cache():
    plan = DemoPlan()
    examples = [plan.task.sample(seed) for seed in range(8)]
    prompts, traces = [list(e.prompt) for e in examples], [list(e.trace) for e in examples]
    llm = LLM(demo_model(), num_blocks=1000)

    def scores(policy, fraction):
        scored = llm.score(prompts, traces, plan.compression(policy, fraction))
        pairs = list(zip(examples, scored, strict=True))
        return {
            kinds: mean(accuracy(e, s.predicted, kinds) for e, s in pairs)
            for kinds in ((TokenKind.LOOKUP,), (TokenKind.LOOKUP, TokenKind.RESTORE))
        }

    full, ours = scores("full", None), scores("query_mixture", 0.1)
    assert full[TokenKind.LOOKUP,] >= 0.99
    assert ours[TokenKind.LOOKUP,] >= 0.97 * full[TokenKind.LOOKUP,]
    for policy in set(POLICIES) - {"query_mixture"}:
        theirs = scores(policy, 0.1)
        assert ours[TokenKind.LOOKUP,] >= theirs[TokenKind.LOOKUP,], policy
        assert ours[TokenKind.LOOKUP, TokenKind.RESTORE] > theirs[TokenKind.LOOKUP, TokenKind.RESTORE], policy


def test_the_format_of_the_cache_can_be_chosen(figures, tmp_path):
    plan = replace(SMALL, fractions=(), num_scored=1, num_generated=1, num_load=1, kv_cache_dtype="int8")
    coded = run_toy(demo_model(), plan, Console(quiet=True), tmp_path)
    assert (figures["kv_cache_dtype"], coded["kv_cache_dtype"]) == ("fp32", "int8")
    assert figures["kv_bytes_per_block"] == pytest.approx(2 * 1.91 * coded["kv_bytes_per_block"], rel=1e-3)
    assert coded["runs"][0]["lookup_accuracy"] == 1.0


def test_an_unknown_format_is_one_sentence():
    result = CliRunner().invoke(app, ["demo", "--kv-cache-dtype", "int3"])
    assert result.exit_code == 2
    assert "kv_cache_dtype is 'int3'" in result.stderr


pytestmark = pytest.mark.slow(
    "a minute and a half; the language model is in tests/eval/test_real_model.py, too"
)
SMALL_REAL = RealPlan(
    others=("streaming_llm",),
    fractions=(0.25,),
    num_tokens=900,
    num_examples=1,
    num_load=4,
    num_load_tokens=600,
    num_answer_tokens=24,
    pool_share=0.5,
    chunk=128,
)


@pytest.fixture(scope="module")
def measured(real_dir, tmp_path_factory):
    """The figures, the folder with the chart, and what was printed."""
    out, console = tmp_path_factory.mktemp("demo"), Console(record=True, width=200, file=io.StringIO())
    return run_language_model(real_dir, SMALL_REAL, console, out), out, console.export_text()


def test_every_policy_is_measured_on_codes_and_text(measured):
    cells = {(row["policy"], row["task"]): row for row in measured[0]["eval"]["rows"]}
    best = measured[0]["load"][1]["policy"]
    assert set(cells) == {(policy, task) for policy in ("full", best, *SMALL_REAL.others) for task in TASKS}
    assert all(row["status"] == "ok" for row in cells.values())
    ours, window = (cells[policy, "needles"] for policy in (best, "streaming_llm"))
    assert ours["kv_bytes"] == window["kv_bytes"] < 0.5 * cells["full", "needles"]["kv_bytes"]
    assert ours["value"] > window["value"]


def test_compressed_conversations_run_at_once(measured):
    full, ours = measured[0]["load"]
    assert ours["most_running"] > full["most_running"]
    assert ours["peak_blocks"] <= SMALL_REAL.num_blocks


def test_it_is_printed_and_drawn(measured):
    figures, out, text = measured
    assert (out / "real_model.png").read_bytes().startswith(b"\x89PNG")
    assert text.index("conversations of 600 tokens at once") < text.index("What stays")
    forms = dict(zip(TASKS, (".3f", ".2f"), strict=True))
    assert all(format(row["value"], forms[row["task"]]) in text for row in figures["eval"]["rows"])


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


GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def naive(heads: list[list[int]], num_tokens: int, size: int) -> int:
    blocks = [set(range(at, at + size)) for at in range(0, num_tokens - size + 1, size)]
    return sum(block.isdisjoint(place for head in heads for place in head) for block in blocks)


@pytest.mark.parametrize("seed", range(20))
def test_survivors_are_followed_through_all_passes(seed):
    """Heads that keep equal or unequal numbers, each a list of the positions that it still holds."""
    rng = random.Random(seed)
    size, uneven, count = rng.choice((1, 4, 8)), rng.random() < 0.5, InPlace(8)
    count.block_size = size
    held, length = [[[] for _ in range(2)] for _ in range(3)], 0
    for number in range(5):
        new = rng.randrange(1, 40)
        held = [[[*head, *range(length, length + new)] for head in rows] for rows in held]
        length += new
        most = rng.randrange(1, len(held[0][0]) + 1)
        slots = [
            [
                sorted(rng.sample(range(len(h)), min(len(h), rng.randrange(most) + 1 if uneven else most)))
                for h in rows
            ]
            for rows in held
        ]
        held = [
            [[h[i] for i in s] for h, s in zip(*rows, strict=True)] for rows in zip(held, slots, strict=True)
        ]
        kept = [[torch.tensor(s) for s in rows] for rows in slots]
        done = SimpleNamespace(first=number == 0, logical_len=length)
        count.compressed(
            SimpleNamespace(seq_id=7), done, kept if uneven else torch.stack([*map(torch.stack, kept)])
        )
        flat = [head for rows in held for head in rows]
        assert count.freed == {7: naive(flat, length, size)}


def test_a_block_that_is_not_full_is_not_counted():
    assert emptied_blocks([torch.tensor([0, 17])], 30, 8) == 1
    assert emptied_blocks([torch.tensor([0, 17])], 32, 8) == 2
    assert emptied_blocks([torch.arange(4), torch.arange(28, 32)], 32, 8) == 2


class Noted(InPlace):
    """Remembers how long the text was at the last pass."""

    last = 0

    def compressed(self, seq, done, kept):
        self.last = done.logical_len
        super().compressed(seq, done, kept)


def test_recency_empties_the_blocks_between_its_ends():
    """streaming_llm keeps 4 tokens at the start and the newest ones: what it empties is known."""
    llm = LLM(demo_model(), num_blocks=100, block_size=16)
    count = llm.engine.extensions.add(Noted(16))
    prompt = llm.tokenizer.encode("star mist vale " * 100)[:300]
    config = CompressionConfig("streaming_llm", budget=100, sinks=4, recent=32, interval=20)
    (out,) = llm.generate([prompt], GREEDY, config)
    assert out.metrics.compactions >= 3
    assert list(count.freed.values()) == [(count.last - 96) // 16 - 1]
    assert out.metrics.blocks_freed >= sum(count.freed.values())
