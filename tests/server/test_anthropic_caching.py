"""cache_control through the API: exact counts, retention that ends, a budget that holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import pytest
import web
from anthropic.types import Usage
from running import MODEL, Running, running_server

from kvreclaim import LLM, CompressionConfig
from kvreclaim.server.anthropic.fields import ConversationFields
from kvreclaim.server.anthropic.prompt import render

SIZE = 16
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Cached:
    """A server with a small pool and a clock that stands still."""

    server: Running
    client: anthropic.Anthropic
    clock: Clock

    def ask(self, system: Any, text: Any = "?", **fields: Any) -> Usage:
        """The usage of one answer of a token."""
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        extra = {"temperature": 0.0, **fields.pop("extra", {})}
        fields = {"model": MODEL, "max_tokens": 1, "messages": messages, **fields}
        if system is not None:
            fields["system"] = system
        usage = self.client.messages.create(**fields, extra_body=extra).usage
        counted = self.count(system, messages)
        assert (
            usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == counted
        )
        split = usage.cache_creation
        both = split.ephemeral_5m_input_tokens + split.ephemeral_1h_input_tokens
        assert both == usage.cache_creation_input_tokens
        return usage

    def count(self, system: Any, messages: Any) -> int:
        given = {} if system is None else {"system": system}
        return self.client.messages.count_tokens(model=MODEL, messages=messages, **given).input_tokens

    def fill(self, num_blocks: int, name: str) -> None:
        """Let other prompts use so many blocks, none of which is used again."""
        while num_blocks > 0:
            usage = self.ask(None, f"{num_blocks:4} {name} " + "y" * 380)
            assert usage.cache_read_input_tokens < SIZE
            num_blocks -= 400 // SIZE

    def load(self) -> dict[str, int]:
        return web.get(f"{self.server.base_url}/load").json()


@pytest.fixture
def cached(tiny_dir: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[Cached]:
    settings = {"num_blocks": 64, "max_num_seqs": 4, **getattr(request, "param", {})}
    llm = LLM(tiny_dir("llama"), **settings)
    clock = Clock()
    llm.engine.memory.pool.pins._clock = clock
    with (
        running_server(llm, chat_template=TEMPLATE) as server,
        anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0) as client,
    ):
        yield Cached(server, client, clock)


def marked(text: str, control: dict[str, str] = MARK) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_control": control}]


def counts(usage: Usage) -> tuple[int, int, int]:
    """(read, created for 5m, created for 1h)"""
    split = usage.cache_creation
    return (
        usage.cache_read_input_tokens,
        split.ephemeral_5m_input_tokens,
        split.ephemeral_1h_input_tokens,
    )


LONG = "abcdefghij" * 10
"""The system prompt, with its role and what follows it, is "system: ...\\nuser: ": 115 tokens, 7 blocks."""


def test_created_once_then_read(cached: Cached):
    assert counts(cached.ask(marked(LONG))) == (0, 112, 0)
    assert counts(cached.ask(marked(LONG))) == (112, 0, 0)
    assert counts(cached.ask(marked(LONG), "another question")) == (112, 0, 0)
    assert counts(cached.ask(LONG, "and one that marks nothing")) == (112, 0, 0), "hits count as read"
    assert counts(cached.ask(LONG.upper())) == (0, 0, 0), "without a breakpoint nothing is created"
    assert counts(cached.ask(marked(LONG.upper()))) == (112, 0, 0), "although it can be hit"


def test_a_stream_counts_the_same(cached: Cached):
    given = {"model": MODEL, "max_tokens": 3, "system": marked(LONG)}
    for expected in ((0, 112, 0), (112, 0, 0)):
        with cached.client.messages.stream(**given, messages=[{"role": "user", "content": "?"}]) as stream:
            first = next(iter(stream))
            assert first.type == "message_start"
            assert counts(first.message.usage) == expected
            assert counts(stream.get_final_message().usage) == expected


def test_a_prompt_of_whole_blocks_is_created_once(cached: Cached):
    """Its last block is computed each time, since there must be something to compute; but it is there."""
    length = 10 * SIZE - cached.count(None, [{"role": "user", "content": ""}])
    text = marked("k" * length)
    assert counts(cached.ask(None, text)) == (0, 160, 0)
    again = cached.ask(None, text)
    assert counts(again) == (144, 0, 0)
    assert again.input_tokens == 16


@pytest.mark.parametrize("cached", [{"max_num_batched_tokens": 96}], indirect=True)
def test_what_a_compressed_request_says_it_created_is_what_others_read(cached: Cached):
    compression = {"kv_compression": {"policy": "knorm", "budget": 64, "interval": 16, "recent": 16}}
    text = "0123456789" * 40
    usage = cached.ask(None, marked(text), max_tokens=4, extra=compression)
    created = usage.cache_creation_input_tokens
    assert usage.model_extra["kv_cache"]["tokens_evicted"] > 0
    assert 0 < created < 400, "what was computed behind an eviction is not indexed"
    assert counts(cached.ask(None, marked(text)))[0] == created


@pytest.mark.parametrize(
    "cached",
    [{"compression": CompressionConfig("knorm", budget=48, sinks=2, recent=8, interval=16)}],
    indirect=True,
)
def test_a_breakpoint_is_where_a_prefix_is_compressed(cached: Cached):
    system = marked(LONG * 4)
    assert cached.ask(system, "GO up", max_tokens=4).cache_read_input_tokens == 0
    assert cached.ask(system, "GO down", max_tokens=4).cache_read_input_tokens > 64
    assert cached.server.llm.engine.scheduler.snapshots.num_hits == 1


@pytest.mark.parametrize("cached", [{"num_blocks": 1024, "enable_prefix_caching": False}], indirect=True)
def test_without_prefix_caching_nothing_is_created_or_read(cached: Cached):
    for _ in range(2):
        assert counts(cached.ask(marked(LONG))) == (0, 0, 0)


@pytest.mark.parametrize("cached", [{"num_blocks": 4096}], indirect=True)
def test_counts_against_a_model_of_the_index(cached: Cached):
    """Random conversations that share beginnings: read is the longest indexed run of whole blocks, created
    what lies behind it, up to the last breakpoint, and was not there."""
    draw, index = random.Random(3), set()
    words = ("aaaa", "bbbbbbbb", "cc", "dddddddddddddddd", "e")
    for _ in range(60):
        blocks = [
            {"type": "text", "text": draw.choice(words) * 4, **({"cache_control": MARK} if mark else {})}
            for mark in draw.choices((True, False), k=draw.randint(1, 4))
        ]
        system = [{"type": "text", "text": draw.choice(words) * 8}]
        if draw.random() < 0.5:
            system[0]["cache_control"] = HOUR
        if sum("cache_control" in block for block in [*system, *blocks]) > 4:
            continue
        body = {"model": MODEL, "system": system, "messages": [{"role": "user", "content": blocks}]}
        prompt = render(ConversationFields.model_validate(body), cached.server.service)
        ids = tuple(prompt.token_ids)
        runs = [ids[: n * SIZE] for n in range(1, len(ids) // SIZE + 1)]
        read = next((n for n, run in enumerate(runs) if run not in index or len(run) == len(ids)), len(runs))
        known = next((n for n, run in enumerate(runs) if run not in index), len(runs))

        def created(ttl_s: float, known: int = known, prompt: Any = prompt) -> int:
            reach = [p.num_tokens // SIZE for p in prompt.breakpoints if p.ttl_s >= ttl_s]
            return max(0, max(reach, default=0) - known) * SIZE

        expected = (read * SIZE, created(300) - created(3600), created(3600))
        assert counts(cached.ask(system, blocks)) == expected
        index.update(runs)


# Retention


def test_a_pin_outlives_others_until_its_time_is_over(cached: Cached):
    cached.ask(marked(LONG))
    assert cached.load()["blocks_pinned"] == 7
    cached.fill(100, "more than the pool holds")
    assert counts(cached.ask(LONG))[0] == 112
    cached.clock.now += 301
    cached.fill(100, "once more")
    assert cached.load()["blocks_pinned"] == 0
    assert counts(cached.ask(LONG))[0] == 0


def test_a_pin_is_never_a_lock(cached: Cached):
    """The budget is half the pool; blocks beyond it are evicted as any other, and every request is served."""
    for number in range(10):
        assert cached.ask(marked(f"{number}" + LONG * 2)).output_tokens == 1
        assert cached.load()["blocks_pinned"] <= 32
    assert cached.load()["blocks_pinned"] == 32
    assert cached.server.llm.engine.memory.stats().pins_refused > 0
    # A prompt that needs nearly all blocks gets those of pins as well.
    usage = cached.ask(None, "q" * 480, max_tokens=12)
    assert usage.output_tokens == 12


@pytest.mark.parametrize("cached", [{"max_pinned_fraction": 0.0}], indirect=True)
def test_no_budget_no_pins(cached: Cached):
    assert counts(cached.ask(marked(LONG))) == (0, 112, 0)
    assert cached.load()["blocks_pinned"] == 0


# Refusals, as the client sees them
