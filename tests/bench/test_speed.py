"""What a step had to do, seen from outside, and requests that come at their times."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

from kvreclaim import LLM, SamplingParams, demo_model
from kvreclaim.bench.step_times import Timed, keep_busy, replay, watching
from kvreclaim.cli.main import app
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.plan.cost import Linear, StepLoad

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def llm() -> LLM:
    return LLM(demo_model(), num_blocks=64, max_num_batched_tokens=32, enable_prefix_caching=False)


def test_loads_are_what_was_computed(llm):
    """A prompt of 40 in two chunks, four tokens that read all before them, and the same for two at once."""
    with watching(llm.engine) as seen:
        llm.generate([[7] * 40], GREEDY)
    chunks = [StepLoad(32, 1, 0, 32 * 16.0), StepLoad(8, 1, 0, 8 * (32 + 4.0))]
    assert seen.loads == chunks + [StepLoad(1, 1, 40 + n, 0.0, 1) for n in range(1, 5)]
    assert all(second > 0 for second in seen.seconds)
    assert len(seen.seconds) == len(seen.loads)
    with watching(llm.engine) as seen:
        llm.generate([[7] * 10, [8] * 10], GREEDY)
    assert seen.loads[0] == StepLoad(20, 2, 0, 100.0, 0)
    assert seen.loads[1:] == [StepLoad(2, 2, 2 * (10 + n), 0.0, 2) for n in range(1, 5)]


def test_passes_are_not_in_a_steps_time(llm):
    config = CompressionConfig("knorm", budget=32, interval=16, recent=8)
    with watching(llm.engine) as seen:
        llm.generate([[7] * 100], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), config)
    totals = llm.engine.totals
    assert seen.passes == totals.compactions > 3
    assert seen.pass_s == pytest.approx(totals.score_s + totals.compact_s)
    assert max(load.kv_tokens for load in seen.loads) <= 32 + 16 + 1


def test_the_engine_is_as_before(llm):
    step, schedule = llm.engine.step, llm.engine.scheduler.schedule
    with watching(llm.engine) as seen:
        keep_busy(llm, 0.2, longest=30, rng=random.Random(0))
    assert (llm.engine.step, llm.engine.scheduler.schedule) == (step, schedule)
    assert seen.loads
    assert not llm.engine.requests
    assert llm.engine.memory.pool.num_in_use == 0


def test_requests_come_at_their_times(llm):
    requests = [Timed(0.0, 20, 3), Timed(0.05, 30, 1), Timed(0.1, 10, 8)]
    served = replay(llm, requests, random.Random(0))
    for each, found in zip(requests, served, strict=True):
        assert each.arrival_s < found.first_token_s <= found.end_s
    assert served[1].first_token_s == served[1].end_s
    assert served[2].first_token_s < served[2].end_s


def test_the_command_writes_what_simulations_read(tmp_path):
    out = tmp_path / "speed.json"
    options = [
        "--model",
        str(demo_model()),
        "--dtype",
        "float32",
        "--seconds",
        "2",
        "--longest",
        "64",
        "--threads",
        "1",
    ]
    result = CliRunner().invoke(app, ["calibrate-speed", *options, "-o", str(out)])
    assert result.exit_code == 0, result.output
    cost = Linear.load(out)
    assert cost.step_s(StepLoad(1, 1, 100, 0.0, 1)) > 0
    assert cost.facts["steps"] >= 50
    assert f"off by {cost.facts['mape']:.1%}" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--log", "x.jsonl"], "add --shape, --gpu, --num-gpu-blocks"),
        (["--share", "0.5"], "--share can be given with --log FILE only"),
        (["--log", "x.jsonl", "--seconds", "5"], "--seconds cannot be given with --log FILE"),
        (["--log", "no.jsonl", "--shape", "Qwen3-8B", "--gpu", "4090", "--num-gpu-blocks", "9"], "no.jsonl"),
    ],
)
def test_options_of_the_other_way_are_refused(tmp_path, options, words):
    result = CliRunner().invoke(app, ["calibrate-speed", *options, "-o", str(tmp_path / "speed.json")])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_a_log_becomes_a_calibration(tmp_path):
    """Requests one after the other, a token in 60 ms: so long takes a step then."""
    rows = [
        {
            "input_toks": 20,
            "output_toks": 21,
            "queued_ts": i * 2.0,
            "first_token_ts": i * 2.0 + 0.06,
            "last_token_ts": i * 2.0 + 21 * 0.06,
        }
        for i in range(12)
    ]
    log, out = tmp_path / "log.jsonl", tmp_path / "speed.json"
    log.write_text("\n".join(map(json.dumps, rows)))
    where = ["--shape", "Qwen3-8B", "--gpu", "4090", "--num-gpu-blocks", "500"]
    result = CliRunner().invoke(app, ["calibrate-speed", "--log", str(log), *where, "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert Linear.load(out).step_s(StepLoad(1, 1, 30, 0.0, 1)) == pytest.approx(0.06, rel=0.02)
