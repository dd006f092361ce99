"""Against a real run of vLLM on a card, whose pool was full for most of it: fitted to its first fifth."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvreclaim.kv_bytes import kv_bytes
from kvreclaim.plan.cards import find_card
from kvreclaim.plan.configs import load_shape
from kvreclaim.plan.cost import Linear
from kvreclaim.plan.roofline import roofline
from kvreclaim.plan.weights import weight_format
from kvreclaim.sim.cluster import Cluster
from kvreclaim.sim.fit import Logged, fit
from kvreclaim.sim.request import Asked
from kvreclaim.sim.settings import Settings

RUN = Path(__file__).parent / "data" / "vllm-run-4090" / "requests.jsonl"
SETTINGS = Settings(2588, max_model_len=32768)
FITTED = {"base": 0.0139718, "token": 1.841156e-05, "kv": 2.715467e-07}
"""What test_the_first_fifth_tells_the_rest has found, so that nobody need seek it. (The pool is full all
the time, so base and kv cannot be told apart: other pairs do as well.)"""


def logged() -> list[Logged]:
    rows = sorted((json.loads(line) for line in RUN.read_text().splitlines()), key=lambda x: x["queued_ts"])
    first = rows[0]["queued_ts"]
    return [
        Logged(
            Asked(row["queued_ts"] - first, row["input_toks"], row["output_toks"]),
            row["first_token_ts"] - first,
            row["last_token_ts"] - first,
        )
        for row in rows
    ]


def start() -> Linear:
    """The card's roofline, its knee smoothed: half of a token's cost is there from the first token on."""
    shape = load_shape("meta-llama/Llama-3.1-8B")
    found = roofline(shape, find_card("4090"), weight_format("auto", shape), kv_bytes("auto", "bf16"))
    return replace(found, token=found.beyond / 2, beyond=found.beyond / 2)


def errors(cost: Linear) -> dict[str, float]:
    """Of the means over all requests: the simulator's over the log's, less 1."""
    log = logged()
    records = Cluster(SETTINGS, cost).run([each.asked for each in log]).records
    count = np.array([each.asked.num_output for each in log])
    arrived = np.array([each.asked.arrival_s for each in log])
    means = []
    for first, end in (
        ([each.first_token_s for each in log], [each.end_s for each in log]),
        ([record.first_token_s for record in records], [record.end_s for record in records]),
    ):
        ttft, e2e = np.array(first) - arrived, np.array(end) - arrived
        means.append([ttft.mean(), e2e.mean(), ((e2e - ttft) / (count - 1)).mean()])
    real, found = means
    return dict(zip(("ttft", "e2e", "tpot"), np.array(found) / np.array(real) - 1, strict=True))


def test_a_fit_to_the_first_fifth_holds_for_the_whole() -> None:
    found = errors(replace(start(), **FITTED))
    assert max(map(abs, found.values())) < 0.05, found


@pytest.mark.slow  # a hundred simulations
def test_the_first_fifth_tells_the_rest() -> None:
    log = logged()
    until = max(each.end_s for each in log) / 5
    cost = fit(log, SETTINGS, start(), until_s=until)
    found = errors(cost)
    assert max(map(abs, found.values())) < 0.05, found


def test_the_fit_knows_nothing_of_what_comes_later() -> None:
    asked = Asked(0.0, 8, 8)
    logged = Logged(asked, 3.0, 9.0)
    assert logged.known_at(5.0) == Logged(asked, 3.0, None)
    assert logged.known_at(1.0) == Logged(asked, None, None)


def test_a_data_sheet_alone_is_off_by_more() -> None:
    """Why calibration is worth it."""
    found = errors(replace(start(), token=start().token * 2, beyond=0.0))
    assert max(map(abs, found.values())) > 0.1


def test_a_fit_finds_a_cost_again() -> None:
    """Of a log that a simulation wrote."""
    true = Linear(base=0.011, token=3e-5, kv=2e-7)
    settings = Settings(300)
    asked = [Asked(i * 0.06, 100 + 37 * i % 400, 60 + 11 * i % 90) for i in range(40)]
    records = Cluster(settings, true).run(asked).records
    log = [Logged(a, r.first_token_s, r.end_s) for a, r in zip(asked, records, strict=True)]
    found = fit(log, settings, Linear(base=0.014, token=2e-5, kv=3e-7), until_s=4.0)
    again = Cluster(settings, found).run(asked).records
    assert np.mean([r.e2e_s for r in again]) == pytest.approx(np.mean([r.e2e_s for r in records]), rel=0.02)
    assert [r.e2e_s for r in again] == pytest.approx([r.e2e_s for r in records], rel=0.1)
