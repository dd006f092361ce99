"""Traces that are read from files, and traces that are drawn."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from random_loads import COST

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule import Footprint
from kvreclaim.sim.cluster import Cluster
from kvreclaim.sim.options import Traffic
from kvreclaim.sim.settings import Settings
from kvreclaim.sim.traces.drawn import Arrivals, TrafficShape
from kvreclaim.sim.traces.files import read_trace

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [1]},
]


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_mooncake(tmp_path) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", MOONCAKE))
    assert trace.form == "mooncake"
    assert trace.knows_content
    first, second = trace.requests
    assert (first.arrival_s, first.num_prompt, first.num_output, first.ids) == (0.0, 512, 1, (1,))
    assert (second.arrival_s, second.num_prompt, second.num_ids, second.ids) == (2.0, 1100, 1100, (1, 2, 3))
    assert [request.arrival_s for request in trace.sped(4).requests] == [0.0, 0.5]


def test_azure(tmp_path) -> None:
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.4799600,3180,8",
    ]
    trace = read_trace(write(tmp_path / "a.csv", lines))
    assert trace.form == "azure"
    assert not trace.knows_content
    assert [(a.num_prompt, a.num_output) for a in trace.requests] == [(4808, 10), (3180, 8)]
    assert trace.span_s == pytest.approx(0.5)


def test_turns_come_behind_the_answer(tmp_path) -> None:
    rows = [
        {"prompt_tokens": 40, "output_tokens": 8, "session": "a", "arrival_s": 0.0},
        {"prompt_tokens": 60, "output_tokens": 8, "session": "a", "think_s": 2.5},
        {"prompt_tokens": 16, "output_tokens": 1, "arrival_s": 1.0, "ids": [7], "piece": 16},
    ]
    trace = read_trace(write(tmp_path / "a.jsonl", rows))
    assert trace.num_requests == 3
    settings = Settings(100, 4, footprint=Footprint(block_size=4))
    outcome = Cluster(settings, COST, follow=trace.follow()).run(trace.requests)
    first, alone, second = outcome.records
    assert alone.num_prompt == 16
    assert second.arrival_s == first.end_s + 2.5
    assert second.hit_tokens == 44, "47 tokens were computed before, and 11 full blocks of them are found"


def test_aiperf_sessions(tmp_path) -> None:
    rows = [
        {"session_id": "s", "input_length": 512, "output_length": 4, "hash_ids": [1], "timestamp": 0},
        {"session_id": "s", "input_length": 600, "output_length": 4, "hash_ids": [1, 2], "delay": 1500},
    ]
    trace = read_trace(write(tmp_path / "a.jsonl", rows))
    assert trace.form == "aiperf"
    settings = Settings(100, 16, footprint=Footprint())
    outcome = Cluster(settings, COST, follow=trace.follow()).run(trace.requests)
    assert outcome.records[1].arrival_s == outcome.records[0].end_s + 1.5
    assert outcome.records[1].hit_tokens == 512


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        (["{"], "line 1 is no JSON"),
        ([{**MOONCAKE[0], "input_length": "9"}], "input_length is '9'"),
        ([{**MOONCAKE[0], "hash_ids": [1]}], "hash_ids has 1 entries"),
        ([{"prompt_tokens": 3, "output_tokens": 1, "wat": 1}], "has wat; known are"),
        (["TIMESTAMP,Tokens", "2023-11-16 18:17:03,1"], "the columns are TIMESTAMP, Tokens"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,1"], "TIMESTAMP is 'noon'"),
    ],
)
def test_what_cannot_be_read_is_refused(rows, message, tmp_path) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read_trace(write(tmp_path / "a", rows))


def test_a_block_size_must_divide_the_pieces() -> None:
    settings = Settings(100, 48, footprint=Footprint(block_size=48))
    requests = TrafficShape(2, 30, 2, prefix=20).trace(Arrivals(1.0)).requests
    with pytest.raises(InvalidArgumentError, match="block_size is 48"):
        Cluster(settings, COST).run(requests)


def test_gaps_have_the_mean_and_the_variation_of_the_arguments() -> None:
    for how, burstiness, variation in (("poisson", 2.0, 1.0), ("gamma", 3.0, 3.0), ("even", 2.0, 0.0)):
        times = Arrivals(4.0, how, burstiness, seed=3).times(20_001)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert fmean(gaps) == pytest.approx(0.25, rel=0.07)
        assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.07, abs=1e-9)


def test_a_conversation_finds_its_earlier_turns_in_full_blocks() -> None:
    shape = TrafficShape(3, prompt=20, output=12, prefix=34, turns=3, think_s=1.0)
    trace = shape.trace(Arrivals(0.001, "even"))
    settings = Settings(400, 8, footprint=Footprint(block_size=8))
    outcome = Cluster(settings, COST, follow=trace.follow()).run(trace.requests)
    by_length = {(r.num_prompt, r.hit_tokens) for r in outcome.records}
    # 34 shared; then 54 + 12 - 1 computed of a turn: 64 in full blocks; then 86 + 12 - 1: 96
    assert by_length == {(54, 0), (54, 32), (86, 64), (118, 96)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trace": Path("x"), "prompt": 5}, "--prompt has no effect beside a file of requests"),
        ({"trace": Path("x"), "arrivals": "even"}, "--arrivals has no effect beside the file's own times"),
    ],
)
def test_options_without_effect_are_refused(given, words):
    with pytest.raises(InvalidArgumentError, match=words):
        Traffic(**given)
