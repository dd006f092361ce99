"""Both dialects protect the system prompt and tools of a chat, as long as nobody switches it off."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from running import MODEL, Running, running_server

from kvreclaim import LLM, CompressionConfig, demo_model

SYSTEM, USER = "wave " * 40, [{"role": "user", "content": "GO wind " * 80}]
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "system", "content": SYSTEM}, *USER]},
    "/v1/messages": {"system": SYSTEM, "messages": USER},
}
OFF = {"protect_system": False}
BUDGET = {"budget": 160, "interval": 16, "recent": 16}


@pytest.fixture(scope="module")
def compressing() -> Iterator[Running]:
    llm = LLM(demo_model(), num_blocks=128, compression=CompressionConfig("shares(surrogate)", **BUDGET))
    with running_server(llm) as running:
        yield running


def cache_of(server: Running, path: str, body: dict, **fields) -> dict:
    asked = {"model": MODEL, "max_tokens": 2, **body, **fields}
    answer = httpx2.post(server.base_url + path, json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["kv_cache"]


@pytest.mark.parametrize("path", BODIES)
def test_a_system_prompt_is_among_the_sinks(path, compressing):
    plain = {"messages": USER}
    assert cache_of(compressing, path, plain)["sinks"] == 4
    served = cache_of(compressing, path, BODIES[path])
    assert 40 <= served["sinks"] <= 64
    assert served["tokens_evicted"] > 0
    assert cache_of(compressing, path, BODIES[path], kv_compression=OFF)["sinks"] == 4
    other = cache_of(compressing, path, BODIES[path], kv_compression={"policy": "knorm", **BUDGET})
    assert (other["policy"], other["sinks"]) == ("knorm", served["sinks"])


@pytest.mark.parametrize("path", BODIES)
def test_one_of_more_than_half_of_the_budget_is_cut_there(path, compressing):
    long = {"kv_compression": {"budget": 64, "interval": 16, "recent": 16}}
    assert cache_of(compressing, path, BODIES[path], **long)["sinks"] == 16
