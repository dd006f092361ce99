"""Recall as a field of requests, and what metrics say of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2
import pytest
from running import MODEL, Running, running_server

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model

PROMPT = [5 + i % 200 for i in range(150)]
SMALL = {"policy": "knorm", "budget": 64, "interval": 32, "sinks": 2, "recent": 16}
RECALL = {**SMALL, "recall": "query(blocks=2)"}


@pytest.fixture(scope="module")
def cold() -> Iterator[Running]:
    with running_server(LLM(demo_model(), num_blocks=128, kv_recall_size=0.05)) as running:
        yield running


def metric(server: Running, name: str) -> float:
    text = httpx2.get(server.base_url + "/metrics").text
    return float(re.search(rf"^kvreclaim:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)[1])


def answer(server: Running, compression: dict) -> httpx2.Response:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return httpx2.post(
        server.base_url + "/v1/completions", json={**body, "kv_compression": compression}, timeout=60
    )


def test_a_request_that_asks_for_it_gets_it(cold: Running) -> None:
    before = metric(cold, "recall_pages_total")
    found = answer(cold, RECALL)
    assert found.status_code == 200, found.text
    assert metric(cold, "recall_pages_total") > before
    assert metric(cold, "recall_bytes_total") > 0
    assert metric(cold, "cold_bytes") == 0, "an ended request holds pages"
    llm = LLM(demo_model(), num_blocks=128, kv_recall_size=0.05)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    wanted = llm.generate([PROMPT], params, CompressionConfig(**RECALL))[0].outputs[0].text
    assert found.json()["choices"][0]["text"] == wanted


@pytest.mark.parametrize(
    ("recall", "words"),
    [("sometimes", "write pass, tokens:N or query"), ("pass(blocks=3)", "leave no place")],
)
def test_what_cannot_be_is_one_sentence(cold: Running, recall: str, words: str) -> None:
    found = answer(cold, {**SMALL, "recall": recall})
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]
    assert found.json()["error"]["message"].count("\n") == 0
