"""A run of vLLM 0.19 on an RTX 4090: fitted on its first fifth, all of it simulated.

Llama-3.1-8B in bf16, 300 ShareGPT requests at 10 a second, a pool of 2,588 blocks that is full most of the
time. requests.jsonl: https://github.com/casys-kaist/LLMServingSim, bench/examples/RTX4090 (MIT).
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.kv_bytes import kv_bytes
from kvreclaim.plan.cards import find_card
from kvreclaim.plan.configs import load_shape
from kvreclaim.plan.cost import Linear
from kvreclaim.plan.roofline import roofline
from kvreclaim.plan.weights import weight_format
from kvreclaim.schedule import Footprint
from kvreclaim.sim.fit_log import fit_log, read_log, simulate_log
from kvreclaim.sim.request import RequestRecord, SimRequest
from kvreclaim.sim.settings import Settings

DATA = Path(__file__).parent / "data" / "vllm-run-4090" / "requests.jsonl"
SHAPE = load_shape("Llama-3.1-8B")
ROOFLINE = roofline(SHAPE, find_card("4090"), weight_format("bf16", SHAPE), kv_bytes("auto", "bfloat16"))
ENGINE = Settings(
    num_blocks=2588,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_model_len=32_768,
    footprint=Footprint(block_size=16, max_chunk=2048),
)


def errors(cost: Linear) -> dict[str, float]:
    """Relative errors of the means over all requests."""
    log = read_log(DATA)
    records = simulate_log([each.request for each in log], ENGINE, cost)
    found = {}
    for name in ("ttft_s", "e2e_s", "tpot_s"):
        measured, simulated = ([getattr(each, name) for each in rows] for rows in (log, records))
        pairs = [pair for pair in zip(measured, simulated, strict=True) if None not in pair]
        found[name] = fmean(ours for _, ours in pairs) / fmean(theirs for theirs, _ in pairs) - 1
    return found


def test_its_first_fifth_tells_the_rest() -> None:
    log = read_log(DATA)
    assert len(log) == 300
    fitted = fit_log(log, ENGINE, ROOFLINE, share=0.2)
    assert fitted.num_times < 0.2 * 2 * len(log)
    before, after = errors(ROOFLINE), errors(fitted.cost)
    assert max(map(abs, before.values())) > 0.1, "or there is nothing to fit"
    assert max(map(abs, after.values())) < 0.05, after


ROWS = [
    {"input_toks": 5, "output_toks": 3, "queued_ts": 102.0, "first_token_ts": 103.0, "last_token_ts": 105.5},
    {"input_toks": 7, "output_toks": 1, "queued_ts": 100.0, "first_token_ts": 104.0, "last_token_ts": 104.0},
]
DETAILED = {
    "input_lens": [5, 7, 9],
    "output_lens": [3, 1, 0],
    "start_times": [102.0, 100.0, 100.5],
    "ttfts": [1.0, 4.0, 0.0],
    "itls": [[1.0, 1.5], [], []],
    "errors": ["", "", "refused"],
}
FOUND = [
    RequestRecord(0, 0, 0.0, 7, 1, first_token_s=4.0, end_s=4.0),
    RequestRecord(1, 0, 2.0, 5, 3, first_token_s=3.0, end_s=5.5),
]


def written(tmp_path, rows):
    path = tmp_path / "log"
    path.write_text(rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows)))
    return path


def test_both_forms(tmp_path):
    for form in (ROWS, [DETAILED], json.dumps(DETAILED, indent=1)):
        assert read_log(written(tmp_path, form)) == FOUND
    assert FOUND[1].tpot_s == 1.25
    assert FOUND[0].tpot_s is None


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("", "has no requests"),
        ("no JSON", "is no log of requests"),
        ([{"input_toks": 5}], "lacks 'output_toks'"),
        ([ROWS[0] | {"first_token_ts": 101.0}], "seconds of one clock"),
        ([ROWS[0] | {"last_token_ts": float("nan")}], "seconds of one clock"),
        ([ROWS[0] | {"output_toks": 0}], "5 tokens in and 0 out"),
        ([DETAILED | {"ttfts": [1.0]}], "is no log of requests"),
    ],
)
def test_what_is_none(tmp_path, rows, words):
    with pytest.raises(InvalidArgumentError, match=words):
        read_log(written(tmp_path, rows))


def test_no_file(tmp_path):
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        read_log(tmp_path / "absent")


VLLM_ENGINE = Settings(num_blocks=400, footprint=Footprint(block_size=16, max_chunk=2048))


def test_what_a_simulation_wrote_is_found_again():
    """Terms twice and half as large as those from which the fit begins."""
    start = Linear(base=10e-3, beyond=50e-6, knee=200, kv=1e-7, pair=1e-9)
    made = Linear(base=20e-3, beyond=100e-6, knee=200, kv=0.5e-7, pair=1e-9)
    requests = [SimRequest(0.15 * i, 30 + 97 * i % 800, 40 + 31 * i % 300) for i in range(60)]
    log = simulate_log(requests, VLLM_ENGINE, made)
    fitted = fit_log(log, VLLM_ENGINE, start, device="a card")
    assert fitted.error < 0.02
    assert fitted.cost.base == pytest.approx(made.base, rel=0.05)
    assert fitted.cost.beyond == pytest.approx(made.beyond, rel=0.25)
    assert fitted.cost.facts["device"] == "a card"


def test_a_log_that_is_too_short_or_too_large():
    log = [RequestRecord(0, 0, 0.0, 10, 10, first_token_s=1.0, end_s=2.0)]
    with pytest.raises(InvalidArgumentError, match="a fit needs 8; take more"):
        fit_log(log, VLLM_ENGINE, Linear(1e-2, beyond=1e-5))
    large = RequestRecord(0, 0, 0.0, 9000, 10, first_token_s=1.0, end_s=2.0)
    with pytest.raises(InvalidArgumentError, match=r"8 requests of the log fit into no pool of 400 blocks"):
        fit_log([large] * 8, VLLM_ENGINE, Linear(1e-2, beyond=1e-5))
