"""A budget that is a share of the prompt counts as the tokens that the engine makes of it."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvreclaim import CompressionConfig
from kvreclaim.cli.main import app
from kvreclaim.compression.spec.traits import for_prompt
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.budget.footprint import SAME, Footprint
from kvreclaim.sim.options import ReplicaOptions, Serving

PLAN = ("plan", "--model", "Llama-3.1-8B", "--gpu", "4090", "--weights", "awq4")
SIMULATE = ("simulate", "--model", "Llama-3.1-8B", "--gpu", "H100", "--num-blocks", "400")
UNTIMED = {"simulated_requests_per_min_per_core", "wall_s", "elapsed_s"}


def run(tmp_path: Path, *arguments: str) -> dict:
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text())


@pytest.mark.parametrize("policy", ["knorm", "pyramidkv"])
@pytest.mark.parametrize("sinks", [0, 4, 100])
@pytest.mark.parametrize(
    ("share", "form"), [("20%", "auto"), ("0.2", "int8"), ("100%", "auto"), ("10%", "int4")]
)
def test_every_length_has_the_budget_of_the_engine(policy, sinks, share, form) -> None:
    config = CompressionConfig(policy, share, sinks=sinks, recent=40)
    machine = ReplicaOptions(gpu="H100", kv_cache_dtype=form)
    density = machine.density  # Llama 3.1 8B: 8 heads of 128 in bf16
    assert density == {"auto": 1, "int8": Fraction(512, 259), "int4": Fraction(512, 144)}[form]
    by_prompt = Serving(compression=f"{policy}:budget={share},sinks={sinks},recent=40").by_prompt(machine)
    for length in (1, 300, 1000, 8192):
        found, own = by_prompt(length), config.for_prompt(length, 16, density).footprint(Footprint())
        assert (found.budget, found.sinks, found.recent) == (own.budget, own.sinks, own.recent)


def test_tokens_stay_as_they_are_written() -> None:
    assert for_prompt("knorm:budget=300, recent=7", 1000, 16, SAME) == "knorm:budget=300, recent=7"
    assert for_prompt("knorm:recent=7,budget=20%", 1000, 16, SAME) == "knorm:budget=192,recent=7"
    assert for_prompt("knorm:recent=7,budget=20%", 1000, 16, Fraction(2)) == "knorm:budget=400,recent=7"


@pytest.mark.parametrize("share", ["20%", "0.2"])
@pytest.mark.parametrize(
    ("length", "budget"),
    [
        (("--context", "8192"), 1632),
        (("--context", "300"), 144),
        (("--sequences", "10", "--own", "5000"), 992),
        (("--sequences", "10", "--prefix", "1000", "--own", "4000"), 992),
    ],
)
def test_a_plan_is_that_of_the_tokens(tmp_path, share, length, budget) -> None:
    """A fifth in whole blocks; at least 133 tokens, which 9 blocks hold."""
    shared, given = (
        run(tmp_path, *PLAN, *length, "--compression", f"snapkv:budget={each}") for each in (share, budget)
    )
    assert shared == given


def test_a_plan_in_another_format_is_that_of_as_many_bytes(tmp_path) -> None:
    """A fifth of 8,192 tokens of 512 bytes a head, where a token in int8 takes 259."""
    options = (*PLAN, "--context", "8192", "--kv-cache-dtype", "int8")
    tokens = 8192 * 512 // 5 // 259 // 16 * 16
    shared, given = (
        run(tmp_path, *options, "--compression", f"snapkv:budget={each}") for each in ("20%", tokens)
    )
    assert shared == given


@pytest.mark.parametrize(("form", "tokens"), [("auto", 400), ("int8", 784)])
def test_a_simulation_is_that_of_the_tokens(tmp_path, form, tokens) -> None:
    load = (
        "--requests",
        "20",
        "--rate",
        "50",
        "--prompt",
        "2000",
        "--output",
        "200",
        "--kv-cache-dtype",
        form,
    )
    shared, given = (
        run(tmp_path, *SIMULATE, *load, "--compression", f"knorm:budget={each}") for each in ("20%", tokens)
    )
    assert shared["blocks_freed"] > 0
    assert {k: v for k, v in shared.items() if k not in UNTIMED} == {
        k: v for k, v in given.items() if k not in UNTIMED
    }


def test_each_prompt_of_a_simulation_has_its_own_budget(tmp_path) -> None:
    """Two requests that do not meet: their counts are the sum of two runs with tokens."""
    trace = tmp_path / "two.jsonl"

    def counts(requests: list[tuple[int, int]], budget: object) -> list[int]:
        lines = [
            {"timestamp": at, "input_length": length, "output_length": 300, "hash_ids": []}
            for at, length in requests
        ]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = ("--trace", str(trace), "--compression", f"knorm:budget={budget}")
        report = run(tmp_path, *SIMULATE, *options, "--no-spread-compression")
        return [report["passes"], report["blocks_freed"]]

    alone = [counts([(0, 1000)], 192), counts([(0, 3000)], 592)]
    both = counts([(0, 1000), (100_000, 3000)], "20%")
    assert both == [sum(each) for each in zip(*alone, strict=True)]
    assert alone[0] != alone[1]


@pytest.mark.parametrize("bad", ["0", "many", "1.5", "120%", "200%", "20000%", "-0.2"])
def test_bad_budgets_are_one_sentence(bad) -> None:
    with pytest.raises(InvalidArgumentError) as config:
        CompressionConfig("knorm", bad)
    for command in ((*PLAN, "--context", "300"), (*SIMULATE, "--requests", "2", "--rate", "1")):
        result = CliRunner().invoke(app, [*command, "--compression", f"knorm:budget={bad}"])
        assert result.exit_code == 2, result.output
        assert str(config.value) in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (PLAN, "a share of each prompt, and a plan has one budget"),
        ((*PLAN, "--context", "300", "--sequences", "4", "--own", "9"), "a plan has one budget"),
        (
            (*SIMULATE, "--requests", "2", "--rate", "1", "--slo", "ttft=2s", "--search", "budget"),
            "needs a policy with a budget in tokens",
        ),
    ],
)
def test_a_share_without_one_length_is_refused(command, message) -> None:
    result = CliRunner().invoke(app, [*command, "--compression", "knorm:budget=20%"])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command", [(*PLAN, "--context", "300"), (*SIMULATE, "--requests", "2", "--rate", "1")]
)
def test_a_share_of_the_full_cache_is_refused(command) -> None:
    result = CliRunner().invoke(app, [*command, "--compression", "full:budget=20%"])
    assert result.exit_code == 2, result.output
    assert "policy 'full' keeps every token, and budget 0.2" in result.stderr
