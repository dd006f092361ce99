"""Nothing that one tenant does reveals the prompts of another one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import web
from running import MODEL, Running, running_server
from steering import LIMIT_S

from kvreclaim import LLM
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.identity import Tenants, tenant_name

MARK = {"type": "ephemeral"}
PROMPT = [{"role": "user", "content": [{"type": "text", "text": "a secret " * 20, "cache_control": MARK}]}]
TEXT = "a secret " * 20
KEYS = ("alice", "bob")
SECRET = "of this test"


@dataclass
class Work:
    """Count the work of the engine's steps: everything that takes time."""

    steps: list[tuple[int, ...]] = field(default_factory=list)

    def added(self, engine: Any, request: Any) -> None: ...

    def stepped(self, engine: Any, result: Any) -> None:
        stats = result.stats
        self.steps.append((stats.num_running, stats.num_waiting, stats.num_tokens))

    def ended(self, engine: Any, request: Any) -> None: ...

    def take(self) -> list[tuple[int, ...]]:
        taken, self.steps = self.steps, []
        return taken


@pytest.fixture
def server(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    llm = LLM(tiny_dir("llama"), num_blocks=128)
    options = {"api_keys": KEYS, "operator_key": "operator", "tenant_secret": SECRET}
    with running_server(llm, **options) as running:
        yield running


def of(server: Running, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.base_url, api_key=key, max_retries=0)


def ask(server: Running, key: str, **extra: Any) -> tuple[int, int]:
    """(read, created)"""
    with of(server, key) as client:
        given = {"model": MODEL, "max_tokens": 4, "messages": PROMPT, "extra_body": extra}
        usage = client.messages.create(**given).usage
        return usage.cache_read_input_tokens, usage.cache_creation_input_tokens


def complete(server: Running, key: str, **extra: Any) -> int:
    """Cached tokens that OpenAI's dialect counts."""
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0) as client:
        given = {"model": MODEL, "prompt": TEXT, "max_tokens": 4, "extra_body": extra}
        return client.completions.create(**given).usage.prompt_tokens_details.cached_tokens


def test_a_prefix_is_shared_within_a_key_only(server: Running):
    first = ask(server, "alice")
    assert first[0] == 0 < first[1]
    assert ask(server, "bob") == first, "as if no request had come before"
    assert ask(server, "alice") == (first[1], 0)
    assert ask(server, "bob") == (first[1], 0)


def test_both_dialects_and_all_ways_to_send_a_key(server: Running):
    assert complete(server, "alice") == 0
    assert complete(server, "bob") == 0
    assert complete(server, "alice") > 0
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 1}
    by_header = web.post(f"{server.base_url}/v1/completions", json=body, headers={"x-api-key": "alice"})
    assert by_header.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_salt_splits_a_key(server: Running):
    _, created = ask(server, "alice", cache_salt="a")
    assert ask(server, "alice") == (0, created)
    assert ask(server, "alice", cache_salt="b") == (0, created)
    assert ask(server, "alice", cache_salt="a") == (created, 0)
    assert ask(server, "bob", cache_salt="a") == (0, created), "a salt that is guessed opens nothing"


def test_a_salt_cannot_be_made_to_look_like_another_tenant(server: Running):
    """The digest that names a tenant in the log opens nothing either."""
    _, created = ask(server, "alice")
    digest = tenant_name(SECRET, "alice")
    for salt in (json.dumps([digest, None]), digest, f'", "{digest}', "null"):
        assert ask(server, "bob", cache_salt=salt) == (0, created)


def work_for_bob(directory: Path, *before: tuple[str, str]) -> tuple[Any, ...]:
    """Steps, usage and answer of bob's prompt after the requests (key, prompt) of others."""
    work = Work()
    with running_server(LLM(directory, num_blocks=128), api_keys=KEYS, operator_key="operator") as server:
        engine = server.service.engine
        engine.host.observers = (*engine.host.observers, work)

        def post(key: str, prompt: str) -> tuple[list[tuple[int, ...]], Any, Any]:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0.0}
            headers = {"authorization": f"Bearer {key}"}
            answer = web.post(f"{server.base_url}/v1/completions", json=body, headers=headers).json()
            settled = engine.call(lambda _: None)  # the last step has been observed
            asyncio.run_coroutine_threadsafe(settled, server.loop).result(LIMIT_S)
            return work.take(), answer["usage"], answer["choices"]

        for key, prompt in before:
            post(key, prompt)
        return post("bob", TEXT)


def test_the_work_for_a_tenant_is_the_same_whatever_another_has_cached(tiny_dir: Callable[[str], Path]):
    """Timing without a clock: the steps that a prompt takes, and the tokens computed in each of them."""
    directory = tiny_dir("llama")
    alone = work_for_bob(directory)
    assert work_for_bob(directory, ("alice", TEXT)) == alone
    assert work_for_bob(directory, ("alice", "something else " * 12)) == alone
    steps, usage, choices = work_for_bob(directory, ("bob", TEXT))
    assert sum(tokens for *_, tokens in steps) < sum(tokens for *_, tokens in alone[0]), (
        "one's own cache shows"
    )
    assert usage != alone[1]
    assert choices == alone[2]


def test_the_engine_gets_the_tenant_of_each_request(server: Running, monkeypatch: pytest.MonkeyPatch):
    engine, tenants = server.llm.engine, []
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda spec, *more: tenants.append(spec.tenant) or add(spec, *more))
    ask(server, "alice")
    complete(server, "bob")
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="alice", max_retries=0) as client:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=1)
    alice, bob = (tenant_name(SECRET, key) for key in KEYS)
    assert tenants == [alice, bob, alice]


def test_pins_of_one_tenant_do_not_starve_another(server: Running):
    """Pins are a bias within a budget, so others are served and can cache."""
    with of(server, "alice") as client:
        for number in range(8):
            text = {"type": "text", "text": f"{number} " + "x" * 300, "cache_control": {**MARK, "ttl": "1h"}}
            message = [{"role": "user", "content": [text]}]
            client.messages.create(model=MODEL, max_tokens=1, messages=message)
    load = web.get(f"{server.base_url}/load", headers={"x-api-key": "operator"}).json()
    assert load["blocks_pinned"] == 64
    _, created = ask(server, "bob")
    assert created > 0
    assert ask(server, "bob") == (created, 0)


def test_the_name_of_a_tenant_does_not_tell_its_key():
    """It depends on a secret: the operator's, or one that no other start of the server has."""

    def name(secret: str | None) -> str | None:
        config = ServerConfig(served_model_name=("m",), api_keys=("weak",), tenant_secret=secret)
        tenant = Tenants(config).of({"x-api-key": "weak"})
        assert tenant is not None
        return tenant.name

    assert name("a") == name("a") != name("b")
    assert name(None) != name(None)
