"""Every field of /v1/messages has an effect; any other is refused by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from bare_messages import (
    CALL,
    DEFINITION,
    HELLO,
    MARK,
    RENDERED,
    TOOL,
    USE,
    answer,
    post,
    refused,
    text,
)
from running import MODEL, Running
from steering import paused, until

from kvreclaim import LLM, SamplingParams
from kvreclaim.server.anthropic.fields import (
    AnthropicTool,
    ConversationFields,
    MessageRequest,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from kvreclaim.server.anthropic.routes import TokensCount

Connect = Callable[..., anthropic.Anthropic]


# What shapes the prompt: the answer is the engine's to the text that the template should make of it.

PROMPTS = {
    "content as blocks": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}]},
        RENDERED,
    ),
    "several texts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            ]
        },
        "user: a\nb\nassistant: ",
    ),
    "citations: null": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": None}]}]},
        "user: a\nassistant: ",
    ),
    "neighbours of one role": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        "user: a\nb\nassistant: ",
    ),
    "system": ({"system": "be brief"}, f"system: be brief\n{RENDERED}"),
    "system in blocks": (
        {"system": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        f"system: be\nbrief\n{RENDERED}",
    ),
    "system message later": (
        {"messages": [*HELLO, {"role": "system", "content": "be brief"}]},
        "user: the end of the story\nsystem: be brief\nassistant: ",
    ),
    "tools": ({"tools": [TOOL]}, DEFINITION + RENDERED),
    "custom tools": ({"tools": [{**TOOL, "type": "custom"}]}, DEFINITION + RENDERED),
    "tool_choice auto": ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, DEFINITION + RENDERED),
    "tool_choice none": ({"tools": [TOOL], "tool_choice": {"type": "none"}}, RENDERED),
    "a call and its result": (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [{"type": "text", "text": "well"}, USE]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "call-1", "content": "sun"}],
                },
            ]
        },
        f"user: the end of the story\nassistant: well{CALL}\ntoolcall-1: sun\nassistant: ",
    ),
    "calls without text, results in order": (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [USE]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "call-1",
                            "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "city"}],
                            "is_error": True,
                        },
                        {"type": "text", "text": "so?"},
                    ],
                },
            ]
        },
        f"user: the end of the story\nassistant: {CALL}\ntoolcall-1: Error: no\ncity\nuser: so?\nassistant: ",
    ),
    "text behind a call": (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [USE, {"type": "text", "text": "wait"}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call-1"}]},
            ]
        },
        f"user: the end of the story\nassistant: {CALL}\nassistant: wait\ntoolcall-1: \nassistant: ",
    ),
    "thinking": (
        {"thinking": {"type": "disabled"}},
        "user: the end of the story\n<no thoughts>assistant: ",
    ),
    "chat_template_kwargs": (
        {"chat_template_kwargs": {"style": "plain"}},
        "user: the end of the story\n<plain>assistant: ",
    ),
    "cache_control": ({"cache_control": MARK}, RENDERED),
    "eager inputs": ({"tools": [{**TOOL, "eager_input_streaming": True}]}, DEFINITION + RENDERED),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_what_shapes_the_prompt(own: Running, tiny_oracle: LLM, name: str):
    fields, prompt = PROMPTS[name]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    assert text(own, **fields) == tiny_oracle.generate(prompt, greedy)[0].outputs[0].text
    counted = TokensCount.model_validate(post(own, "/count_tokens", **fields).json())
    assert counted.input_tokens == len(tiny_oracle.tokenizer.encode(prompt))


# What shapes the answer: the engine's with the same settings, and another one than without.

LONG = {"max_tokens": 60}
"""So many that a random model says some token twice, which is what penalties are for."""

SAMPLED = {
    "max_tokens": ({"max_tokens": 3}, {"max_tokens": 3}),
    "temperature": ({"temperature": 3.0, "seed": 5}, {"temperature": 3.0, "seed": 5}),
    "temperature of its own accord is 1": ({"temperature": None, "seed": 5}, {"temperature": 1.0, "seed": 5}),
    "seed": ({"temperature": 3.0, "seed": 6}, {"temperature": 3.0, "seed": 6}),
    "top_k": ({"temperature": 9.0, "top_k": 3, "seed": 5}, {"temperature": 9.0, "top_k": 3, "seed": 5}),
    "top_p": ({"temperature": 9.0, "top_p": 0.2, "seed": 5}, {"temperature": 9.0, "top_p": 0.2, "seed": 5}),
    "min_p": ({"temperature": 9.0, "min_p": 0.9, "seed": 5}, {"temperature": 9.0, "min_p": 0.9, "seed": 5}),
    "repetition_penalty": (LONG | {"repetition_penalty": 3.0}, LONG | {"repetition_penalty": 3.0}),
    "presence_penalty": (LONG | {"presence_penalty": 2.0}, LONG | {"presence_penalty": 2.0}),
    "frequency_penalty": (LONG | {"frequency_penalty": 2.0}, LONG | {"frequency_penalty": 2.0}),
    "logit_bias": ({"logit_bias": {"65": 100.0}}, {"logit_bias": {65: 100.0}}),
    "stop_sequences": (
        {"logit_bias": {"65": 100.0}, "min_tokens": 4, "stop_sequences": ["bb"]},
        {"logit_bias": {65: 100.0}, "min_tokens": 4, "stop": ["bb"]},
    ),
    "min_tokens": (
        {"logit_bias": {"65": 100.0}, "stop_sequences": ["bb"], "min_tokens": 8},
        {"logit_bias": {65: 100.0}, "stop": ["bb"], "min_tokens": 8},
    ),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_what_shapes_the_answer(own: Running, tiny_oracle: LLM, name: str):
    fields, params = SAMPLED[name]

    def alone(**settings: Any) -> str:
        settings = {"temperature": 0.0, "max_tokens": 12, **settings}
        return tiny_oracle.generate(RENDERED, SamplingParams(**settings))[0].outputs[0].text

    assert text(own, **fields) == alone(**params)
    changed = {"temperature": 0.0, "seed": 7, "stop": None}
    key = {"stop_sequences": "stop"}.get(name, name.partition(" ")[0])
    bare = {k: v for k, v in params.items() if k != key} | {k: v for k, v in changed.items() if k == key}
    assert alone(**params) != alone(**bare), "the field changes nothing here; choose another value"


def test_ignore_eos(server: Running):
    fields = {"messages": [{"role": "user", "content": "the sun the sun the sun"}], "max_tokens": 24}
    assert answer(server, **fields).usage.output_tokens < 24
    assert answer(server, **fields, ignore_eos=True).usage.output_tokens == 24


def test_kv_compression(server: Running):
    fields = {"messages": [{"role": "user", "content": "the sun " * 100}], "ignore_eos": True}
    compressed = {"policy": "knorm", "budget": 64, "interval": 16, "recent": 16}
    assert answer(server, **fields).usage.kv_cache.tokens_evicted == 0
    usage = answer(server, **fields, kv_compression=compressed).usage
    assert usage.kv_cache.tokens_evicted > 0
    assert usage.kv_cache.blocks_freed > 0
    assert "kv_compression: budget" in refused(server, kv_compression={"budget": 0})
    assert "compress_prompt_at is 2" in refused(server, compress_prompt_at=2)
    assert "conversation_snapshots" in refused(server, conversation_snapshots="no")  # and its own file
    assert "kv_compression.stats" in refused(server, kv_compression={"stats": "/etc/passwd"})


def test_sparse_prefill(server: Running):
    assert text(server, sparse_prefill="dense") == text(server)
    assert "sparse_prefill" in refused(server, sparse_prefill="pooled")


def test_cache_salt(own: Running):
    messages = [{"role": "user", "content": "salt and pepper " * 4}]

    def read(**fields: Any) -> int:
        return answer(own, messages=messages, **fields).usage.cache_read_input_tokens

    assert read(cache_salt="a") == 0
    assert read(cache_salt="a") > 0
    assert read(cache_salt="b") == 0
    assert read() == 0


def test_priority(own: Running):
    """The waiting request with the lower number runs first."""
    ended: list[int] = []

    class Watcher:
        added = stepped = staticmethod(lambda *_: None)

        def ended(self, _: object, request: Any) -> None:
            ended.append(request.spec.priority)

    engine = own.service.engine
    before = engine.host.observers
    engine.host.observers = (*before, Watcher())
    with paused(own):
        threads = []
        for number in (7, -3):
            threads.append(threading.Thread(target=post, args=(own,), kwargs={"priority": number}))
            threads[-1].start()
            until(lambda: engine.num_queued == len(threads))
    for thread in threads:
        thread.join()
    engine.host.observers = before
    assert ended == [-3, 7]


def test_priority_needs_its_policy(server: Running):
    assert "priority is 1, but scheduling_policy is fcfs" in refused(server, priority=1)


def test_the_user_is_in_the_log(own: Running, caplog: pytest.LogCaptureFixture):
    def lines() -> list[dict[str, Any]]:
        return [r.fields for r in caplog.records if getattr(r, "fields", {}).get("user") == "user-4711"]

    with caplog.at_level(logging.INFO, logger="kvreclaim"):
        text(own, metadata={"user_id": "user-4711"})
        until(lines)
    assert lines()[0]["model"] == MODEL


def test_the_clients_headers_are_accepted(own: Running, connect: Connect):
    client = connect(own, default_headers={"anthropic-beta": "prompt-caching-2024-07-31"})
    message = client.messages.create(model=MODEL, max_tokens=3, messages=HELLO)
    assert message.usage.output_tokens == 3


def test_no_field_is_missing_here():
    """A field that is added must be added to the tables above, and to docs/api.md."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    described = page[page.index("## Anthropic") :]
    assert all(f"`{name}" in described for name in MessageRequest.model_fields)
    tested = {name.partition(" ")[0] for name in PROMPTS} | {name for f, _ in PROMPTS.values() for name in f}
    tested |= {name for fields, _ in SAMPLED.values() for name in fields}
    tested |= {"model", "stream", "ignore_eos", "kv_compression", "cache_salt", "priority", "metadata"}
    tested |= {"compress_prompt_at", "conversation_snapshots", "sparse_prefill"}
    tested |= {"service_tier"}  # it has no effect
    tested |= {"output_config", "output_format"}  # in test_forced_http.py
    assert set(MessageRequest.model_fields) <= tested
    assert set(ConversationFields.model_fields) <= tested
    blocks = {
        TextBlock: "text citations kv_drop",
        ToolUseBlock: "id name input",
        AnthropicTool: "name description input_schema strict eager_input_streaming",
    }
    blocks[ToolResultBlock] = "tool_use_id content is_error kv_drop"  # in test_kv_drop.py
    for model, names in blocks.items():
        assert set(model.model_fields) == {"type", "cache_control", *names.split()}
