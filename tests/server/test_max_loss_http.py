"""Requests with max_loss in place of a budget, in both dialects; the usage reports the budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from curves import curve
from running import MODEL, Running, running_server

from kvreclaim import LLM, CompressionConfig, demo_model
from kvreclaim.compression.stats import QueryStats
from kvreclaim.model_paths import statistics_beside

BODIES = {
    "/v1/completions": {"prompt": [5 + i % 200 for i in range(350)]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "GO wind " * 150}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "GO wind " * 150}]},
}
LOSSES = {("prose", 512): {160: 0.05, 192: 0.0}, ("lookups", 512): {160: 0.3, 192: 0.05}}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    stats = QueryStats.load(statistics_beside(demo_model()))
    path = tmp_path_factory.mktemp("curve") / "stats.safetensors"
    stats.with_curve(curve(stats.metadata.trial.best, LOSSES)).save(path)
    return path


@pytest.fixture(scope="module")
def promising(file) -> Iterator[Running]:
    own = CompressionConfig(max_loss=0.05, stats=file)
    with running_server(LLM(demo_model(), num_blocks=256, compression=own)) as running:
        yield running


def ask(server: Running, path: str, compression: dict | None) -> httpx2.Response:
    body = {"model": MODEL, "max_tokens": 2, **BODIES[path]}
    if compression is not None:
        body["kv_compression"] = compression
    return httpx2.post(server.base_url + path, json=body, timeout=60)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("compression", "budget"),
    [
        (None, 192),
        ({"content": "prose"}, 160),
        ({"max_loss": 0.3}, 160),
        ({"max_loss": 0.01}, None),
        ({"max_loss": 0.01, "content": "prose"}, 192),
        ({"budget": 256}, 256),
    ],
)
def test_the_budget_is_the_curves(promising, path, compression, budget) -> None:
    answer = ask(promising, path, compression)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]["kv_cache"]
    assert usage["budget"] == budget
    assert (usage["tokens_evicted"] > 0) == (budget is not None)
    assert (usage["policy"] == "full") == (budget is None)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("compression", "message"),
    [
        ({"budget": 256, "max_loss": 0.1}, "budget is 256 and max_loss 0.1, which chooses a budget"),
        ({"max_loss": 2.0}, "max_loss is 2.0; it must be a number from 0.0 to 1.0"),
        ({"content": "poems"}, "poems"),
        ({"recent": 16}, "recent is 16, but losses are measured with 128"),
        ({"policy": "knorm", "max_loss": 0.1}, "policy is 'knorm', but the loss was measured under"),
    ],
)
def test_what_cannot_be_promised_is_a_400(promising, path, compression, message) -> None:
    answer = ask(promising, path, compression)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_a_request_stays_in_the_format_of_the_server(file, tmp_path) -> None:
    """It has that format's losses: a budget for a larger one, and a 400 for less than rounding costs."""
    stats = QueryStats.load(file)
    int8 = {place: {160: 0.2, 192: 0.06, 512: 0.02} for place in LOSSES}
    stats = stats.with_curve(curve(stats.metadata.trial.best, LOSSES, {"int8": int8}))
    stats.save(tmp_path / "coded.safetensors")
    own = CompressionConfig(max_loss=0.06, stats=tmp_path / "coded.safetensors")
    llm = LLM(demo_model(), num_blocks=256, compression=own)
    assert llm.engine.kv_format.name == "int8"
    with running_server(llm) as server:
        for max_loss, budget in ((0.06, 192), (0.2, 160), (0.02, None)):
            answer = ask(server, "/v1/completions", {"max_loss": max_loss})
            assert answer.json()["usage"]["kv_cache"]["budget"] == budget
        answer = ask(server, "/v1/completions", {"max_loss": 0.01})
        assert answer.status_code == 400
        assert "keys and values in int8 lose more even if every token stays" in answer.text


def test_within_an_operators_bound_and_without_a_curve(file) -> None:
    """A promise may need every token; statistics without a curve promise nothing."""
    own = CompressionConfig(budget=192, stats=file)
    with running_server(LLM(demo_model(), num_blocks=128, compression=own), max_kv_budget=256) as server:
        answer = ask(server, "/v1/completions", {"max_loss": 0.1})
        assert answer.status_code == 400
        assert "max_loss may keep every token, but this server keeps 256 at most" in answer.text
    with running_server(LLM(demo_model(), num_blocks=128, compression=replace(own, stats=None))) as server:
        answer = ask(server, "/v1/completions", {"max_loss": 0.1})
        assert answer.status_code == 400
        assert "the statistics hold no loss curve" in answer.text
