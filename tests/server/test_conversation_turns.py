"""A compressed conversation over HTTP continues from the tokens that its last turn kept, as usage reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import web
from exposition import Scrape
from running import MODEL, Running, running_server

from kvreclaim import LLM, CompressionConfig

WORDS = "the end of the story then the stop " * 12
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    compression = CompressionConfig("knorm", budget=64, interval=32, sinks=4, recent=16)
    llm = LLM(
        tiny_dir("llama"),
        num_blocks=400,
        max_num_batched_tokens=64,
        compression=compression,
        conversation_snapshots=True,
    )
    with running_server(llm, chat_template=TEMPLATE) as running:
        yield running


def post(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = web.post(server.base_url + path, json={"model": MODEL, **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def counted(server: Running) -> float:
    text = web.get(f"{server.base_url}/metrics").text
    return Scrape.of(text).value("kvreclaim:snapshot_tokens_total")


def turns(server: Running, salt: str, **more: Any) -> tuple[int, int, int]:
    """Two turns of token ids. Returns: tokens of the second one's prompt, served, of these of a snapshot."""
    prompt = server.llm.tokenizer.encode(WORDS)
    for _ in range(2):
        ask = {"prompt": prompt, "return_token_ids": True, "cache_salt": salt, **more}
        answer = post(server, "/v1/completions", **ask)
        usage, known = answer["usage"], len(prompt)
        prompt += answer["choices"][0]["token_ids"] + prompt[:40]
    details = usage["prompt_tokens_details"]
    assert usage["kv_cache"]["snapshot_tokens"] == details["snapshot_tokens"]
    return known, details["cached_tokens"], details["snapshot_tokens"]


def test_completions(server: Running):
    """All but the new tokens, and the answer's last one, are served; not where a request wants that not."""
    before = counted(server)
    known, cached, found = turns(server, "a")
    assert cached == found == known - 41
    assert counted(server) == before + found
    load = web.get(f"{server.base_url}/load").json()
    assert load["blocks_in_use"] == 0, "snapshots give way"
    assert load["blocks_cached"] > 0
    known, cached, found = turns(server, "b", conversation_snapshots=False)
    assert found == 0
    assert cached < known / 2
    assert turns(server, "c", kv_compression={"policy": "full"})[2] == 0


def test_a_chat(server: Running):
    """The client sends text back, which makes the same tokens again."""
    messages, found = [{"role": "user", "content": WORDS}], []
    for _ in range(3):
        answer = post(server, "/v1/chat/completions", messages=messages)
        found.append(answer["usage"]["prompt_tokens_details"]["snapshot_tokens"])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "and then"}]
    assert found[0] == 0
    assert found[1:] == sorted(found[1:])


def test_a_chat_whose_reasoning_is_left_out(server: Running):
    """The template writes the answer in other tokens: all but the end of the last prompt is served."""
    llm = server.llm.sibling(num_blocks=100, max_num_batched_tokens=64, conversation_snapshots=True)
    with running_server(llm, chat_template=TEMPLATE, reasoning_parser="think") as thinking:
        messages = [{"role": "user", "content": WORDS + "so"}]
        compressed = {"policy": "knorm", "budget": 64, "interval": 32, "sinks": 4, "recent": 16}
        first = post(thinking, "/v1/chat/completions", messages=messages, kv_compression=compressed)
        messages += [{"role": "assistant", "content": "then"}, {"role": "user", "content": "and then"}]
        second = post(thinking, "/v1/chat/completions", messages=messages, kv_compression=compressed)
    assert first["usage"]["prompt_tokens_details"]["snapshot_tokens"] == 0
    expected = first["usage"]["prompt_tokens"] - 16
    assert second["usage"]["prompt_tokens_details"]["snapshot_tokens"] == expected


def test_a_hint_keeps_a_conversation_for_its_time(server: Running):
    """Beside others, in room for three snapshots."""
    snapshots, now = server.llm.engine.scheduler.snapshots, 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "clock", lambda: now)
        patch.setattr(snapshots, "max_blocks", 15)
        prompt = server.llm.tokenizer.encode(WORDS)

        def ask(prompt: list[int], **more: Any) -> tuple[list[int], int]:
            answer = post(server, "/v1/completions", prompt=prompt, return_token_ids=True, **more)
            found = answer["usage"]["prompt_tokens_details"]["snapshot_tokens"]
            return prompt + answer["choices"][0]["token_ids"] + prompt[:40], found

        for elapsed, is_kept in ((59, True), (61, False)):
            kept, _ = ask([elapsed, *prompt], cache_salt="kept", agent_hint={"cache_control": {"ttl": 60}})
            other, _ = ask([elapsed, *prompt], cache_salt="other")
            now += elapsed
            for number in range(4):
                ask([100 + number, *prompt], cache_salt=f"{elapsed}")
            assert ask(other, cache_salt="other")[1] == 0
            assert (ask(kept, cache_salt="kept")[1] > 0) == is_kept
            snapshots.clear()


def test_messages(server: Running):
    """Anthropic's breakpoints move along with the turns."""
    client = anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0)
    mark, messages, usages = {"type": "ephemeral"}, [], []
    compression = {"policy": "knorm", "budget": 32, "interval": 16, "sinks": 2, "recent": 8}
    with client:
        for _ in range(3):
            block = {"type": "text", "text": WORDS[:180], "cache_control": mark}
            messages.append({"role": "user", "content": [block]})
            message = client.messages.create(
                model=MODEL,
                max_tokens=12,
                messages=messages,
                extra_body={"temperature": 0, "ignore_eos": True, "kv_compression": compression},
            )
            usages.append(message.usage)
            messages.append({"role": "assistant", "content": message.content})
    assert 0 < usages[-1].kv_cache["snapshot_tokens"] <= usages[-1].cache_read_input_tokens
