"""Traces are read in every form, and lower bounds of cards never exceed what was simulated to be enough."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvreclaim.cli.main import app
from kvreclaim.compression.spec.traits import footprint
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.kv_bytes import KV_BYTES
from kvreclaim.plan.cards import all_cards, find_card
from kvreclaim.plan.choose import MEASURES, Chooser
from kvreclaim.plan.configs import load_shape
from kvreclaim.plan.demand import Cache
from kvreclaim.plan.lengths import Lengths, read_lengths
from kvreclaim.plan.targets import Targets, parse_targets
from kvreclaim.plan.weights import WEIGHTS
from kvreclaim.schedule.budget.footprint import Footprint

runner = CliRunner()


def like_azure(num: int = 6000, seconds: float = 1202.0) -> Lengths:
    """About as many tokens a second as the first 6,000 requests of Azure's conversations."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(6.5, 1.0, num), 10, 8000).astype(np.int64)
    outputs = np.clip(rng.lognormal(5.0, 0.8, num), 10, 1000).astype(np.int64)
    return Lengths(prompts, outputs, np.linspace(0, seconds, num))


def chooser(compression: str | None = None, **changes: object) -> Chooser:
    rules = Footprint() if compression is None else footprint(compression)
    cache = Cache(load_shape("Llama-3.1-8B"), KV_BYTES["bf16"], rules)
    made = Chooser(
        cache,
        WEIGHTS["bf16"],
        like_azure(),
        Targets(2.0, 0.06),
        utilization=0.9,
        other_bytes=None,
        max_num_seqs=256,
        bandwidth_share=0.8,
        flops_share=0.6,
    )
    return replace(made, **changes)


SIMULATED = {"4090": 3, "A100": 2, "H100": 1, "H200": 1}
"""Replicas that a simulation of the real trace found to be enough."""


@pytest.mark.parametrize("compression", [None, "triattention:budget=1024,interval=128"])
def test_bounds_are_below_what_is_enough(compression: str | None) -> None:
    made = chooser(compression)
    found = {card.name: made.bound(card) for card in all_cards()}
    assert found["L4"].replicas is None
    assert found["L4"].binds == "bandwidth"
    assert "reading the weights alone takes 62.5 ms a step, and 60 are allowed" in found["L4"].why
    for name, enough in SIMULATED.items():
        assert 1 <= found[name].replicas <= enough
        assert found[name].binds == "compute"
        assert found[name].replicas == np.ceil(max(found[name].shares.values()))
    assert found["H100"].price == 2.69


def test_twice_the_load_takes_twice_the_share() -> None:
    once, twice = (chooser(speed=speed).bound(find_card("4090")) for speed in (1.0, 2.0))
    for name, share in once.shares.items():
        assert twice.shares[name] == pytest.approx(2 * share)
    assert twice.replicas > once.replicas


def test_memory_binds_where_it_is_short_and_a_budget_helps() -> None:
    """Long answers on a card with little left: what is held is more than the pool."""
    long = Lengths(np.full(400, 2000), np.full(400, 6000), np.linspace(0, 400, 400))
    memory = 20 << 30
    whole = chooser(lengths=long, slo=Targets()).bound(find_card("H100"), memory)
    cut = chooser("snapkv:budget=1024", lengths=long, slo=Targets()).bound(find_card("H100"), memory)
    assert (whole.binds, cut.shares["compute"]) == ("memory", whole.shares["compute"])
    assert cut.replicas < whole.replicas


def test_several_cards_hold_what_one_does_not() -> None:
    cache = Cache(load_shape("Llama-3.1-70B"), KV_BYTES["bf16"], Footprint())
    assert chooser(cache=cache, slo=Targets()).bound(find_card("H100")).per_replica == 2
    assert chooser(cache=cache, slo=Targets()).bound(find_card("A100"), 70 << 30).per_replica == 4
    none = chooser(cache=cache, slo=Targets()).bound(find_card("L4"), 12 << 30)
    assert (none.replicas, none.binds, none.per_replica) == (None, "memory", 8)
    slow = chooser(slo=Targets(ttft_s=0.05)).bound(find_card("4090"))
    assert slow.replicas is None
    assert slow.why.startswith("computing the p99 prompt of")


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "wait=2s", "ttft=2s,ttft=3s", "ttft=0s", "e2e=3s"])
def test_targets_are_read_or_refused(text: str) -> None:
    assert parse_targets("ttft=2s, tpot=60ms") == Targets(2.0, 0.06)
    assert parse_targets("TPOT=0.5") == Targets(None, 0.5)
    with pytest.raises(
        InvalidArgumentError, match=r"--slo is .* write ttft=2s,tpot=60ms, with any of ttft, tpot, each once"
    ):
        parse_targets(text, MEASURES)


def test_traces_are_read_in_every_form(tmp_path: Path) -> None:
    azure, lines, vllm = (tmp_path / name for name in ("a.csv", "m.jsonl", "v.jsonl"))
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:48.6805900,10,0\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    rows = [{"timestamp": 1000, "input_length": 374, "output_length": 44, "hash_ids": [1]}]
    rows += [{"timestamp": 5314, "input_length": 396, "output_length": 109, "hash_ids": [1, 2]}]
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    vllm.write_text('{"input_toks": 374, "output_toks": 44}\n{"input_toks": 396, "output_toks": 109}\n')
    for path in (azure, lines, vllm):
        found = read_lengths(path)
        assert (found.prompts.tolist(), found.outputs.tolist()) == ([374, 396], [44, 109])
        if path is vllm:
            with pytest.raises(InvalidArgumentError, match="does not say when"):
                _ = found.duration_s
        else:
            assert found.duration_s == pytest.approx(4.314, abs=1e-3)
    assert len(read_lengths(lines, first=1).prompts) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no request with an answer"),
        ('{"input_length": 3}\n', r"line 1 has no lengths"),
        ('{"input_length": 3, "output_length": -1}\n', r"line 1 has no lengths"),
        ("{nonsense\n", "line 1 is no JSON"),
        ("a,b\n1,2\n", "line 2 has no lengths"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        read_lengths(path)
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_lengths(tmp_path / "none")


def test_the_command_says_why_not(tmp_path: Path) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    load = like_azure(500, 100.0)
    columns = zip(load.prompts.tolist(), load.outputs.tolist(), load.arrivals.tolist(), strict=True)
    rows = ({"input_length": p, "output_length": o, "arrival_s": a} for p, o, a in columns)
    trace.write_text("\n".join(map(json.dumps, rows)))
    model = ["plan", "--model", "Llama-3.1-8B", "--trace", str(trace)]
    options = ["--cards", "all", "--slo", "ttft=2s,tpot=60ms", "--json", str(out)]
    result = runner.invoke(app, [*model, *options])
    assert result.exit_code == 0, result.output
    assert "none: reading the weights alone takes 62.5 ms" in result.output
    found = json.loads(out.read_text())["cards"]
    assert {row["card"] for row in found} == {card.name for card in all_cards()}
    refused = [row["least_replicas"] is None for row in found]
    assert refused == sorted(refused)
    prices = [row["price_per_hour"] for row in found if row["price_per_hour"] is not None]
    assert prices == sorted(prices)
    assert len(prices) > 4
    card = ["--gpu", "h100", "--recompute-p99-ms", "500", "--explain"]
    result = runner.invoke(app, [*model, *card])
    assert result.exit_code == 0, result.output
    assert "by exact convolution" in result.output
