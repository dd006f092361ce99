"""The demo measures what it says, and the project's own model shows what the method promises."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from statistics import mean

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvreclaim import LLM, demo_model
from kvreclaim.cli.main import app
from kvreclaim.demo.main import run_demo, run_toy
from kvreclaim.demo.toy import POLICIES, DemoPlan
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
