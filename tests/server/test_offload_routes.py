"""Host and disk as clients and the operator see them: usage, status, forgetting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import web
from running import MODEL, Running, openai_client, running_server
from steering import until

from kvreclaim import LLM, demo_model
from kvreclaim.server.admin import system

GIB = 2**30
PROMPT = " ".join(f"k{i % 9 + 1} v{i % 7 + 1}" for i in range(100))
Serve = Callable[[], "contextmanager[Running]"]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """A server whose disk is the same each time."""

    @contextmanager
    def serve(**config: object) -> Iterator[Running]:
        sizes = {"kv_offloading_size": 4e6 / GIB, "kv_offloading_disk_size": 8e6 / GIB}
        where = {"kv_offloading_disk_path": str(tmp_path), "kv_load_policy": "wait_complete"}
        with running_server(LLM(demo_model(), num_blocks=64, **sizes, **where), **config) as server:
            yield server

    return serve


def usage(server: Running, **fields: object) -> dict:
    with openai_client(server) as client:
        request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0, **fields}
        answer = client.completions.create(**request)
        if not fields.get("stream"):
            return answer.usage.model_dump()
        return [chunk.usage for chunk in answer][-1].model_dump()


def details(server: Running, **fields: object) -> tuple[int, dict[str, int] | None]:
    found = usage(server, **fields)["prompt_tokens_details"]
    return found["cached_tokens"], found.get("cached_tokens_by_tier")


def reset(server: Running, query: str = "", **headers: str) -> int:
    answer = web.post(f"{server.base_url}/reset_prefix_cache{query}", headers=headers)
    if answer.status_code == 200:
        assert not answer.content
    return answer.status_code


def status(server: Running) -> dict:
    answer = web.get(f"{server.base_url}/kv_offload/status")
    assert answer.status_code == 200
    return answer.json()


def test_usage_says_where_cached_tokens_lay(serve: Serve) -> None:
    with serve() as server:
        num_prompt = usage(server)["prompt_tokens"]
        full = (num_prompt - 1) // 16 * 16
        assert full > 100
        assert details(server) == (full, None)
        assert reset(server) == 200
        assert details(server) == (full, {"device": 0, "host": full, "disk": 0})
        assert reset(server, "?external=false") == 200
        streamed = details(server, stream=True, stream_options={"include_usage": True})
        assert streamed == (full, {"device": 0, "host": full, "disk": 0})
        with openai_client(server) as client:
            messages = [{"role": "user", "content": PROMPT}]
            for _ in range(2):
                answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
                reset(server)
            by_tier = answer.usage.prompt_tokens_details.cached_tokens_by_tier
            assert by_tier["host"] == answer.usage.prompt_tokens_details.cached_tokens > 100
    with serve() as server:
        assert details(server) == (full, {"device": 0, "host": 0, "disk": full})


@pytest.mark.parametrize("name", ["external", "reset_external"])
def test_what_is_forgotten_everywhere_stays_so(serve: Serve, name: str) -> None:
    with serve() as server:
        usage(server)
        assert reset(server, f"?{name}=true") == 200
        tiers = status(server)["tiers"]
        assert tiers["host"]["cached"] == tiers["disk"]["slots"]["cached"] == 0
        assert details(server) == (0, None)
        assert reset(server, f"?{name}=true") == 200
    with serve() as server:
        assert status(server)["tiers"]["disk"]["recovered"] == 0
        assert details(server) == (0, None)


def test_what_a_reset_does_not_know(serve: Serve) -> None:
    with serve() as server:
        usage(server)
        for query in ("?extenal=true", "?external=maybe", "?reset_running_requests=true"):
            assert reset(server, query) == 400, query
        assert details(server)[0] > 0, "nothing was forgotten"


def test_a_disk_that_does_not_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "CLEAR_S", 0.01)
    monkeypatch.setattr(system, "is_clearing", lambda host: True)
    with serve() as server:
        assert reset(server, "?external=true") == 503
        assert reset(server) == 200


def test_status(serve: Serve) -> None:
    with serve() as server:
        num_prompt = usage(server)["prompt_tokens"]
        until(lambda: status(server)["tiers"]["host"]["in_use"] == 0)  # a block on its way to disk is in use
        found = status(server)
        assert found["enabled"] is True
        tiers, memory = found["tiers"], server.llm.engine.memory
        assert tiers["host"]["num_slots"] == memory.offload.host.pool.num_blocks
        assert tiers["host"]["cached"] >= num_prompt // 16
        assert tiers["asked_tokens"] == (num_prompt - 1) // 16 * 16
        assert tiers["moves"]["store_bytes"] == tiers["host"]["cached"] * tiers["bytes_per_block"]
        assert tiers["disk"]["slots"]["num_slots"] == memory.offload.disk.tier.pool.num_blocks


def test_status_and_reset_without_tiers(server: Running) -> None:
    assert status(server) == {"enabled": False, "tiers": None}
    prompt = "GO sky " * 40
    assert details(server, prompt=prompt)[1] is None
    assert details(server, prompt=prompt)[0] > 0
    assert reset(server, "?external=true") == 200
    assert details(server, prompt=prompt) == (0, None)


def test_forgetting_is_the_operators(serve: Serve) -> None:
    with serve(api_keys=("alice", "bob"), operator_key="op") as server:
        assert reset(server, **{"x-api-key": "alice"}) == 401
        assert reset(server, **{"x-api-key": "op"}) == 200
