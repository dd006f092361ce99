"""Every field of /v1/messages has an effect; any other is refused by name."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from running import MODEL, Running, running_server
from steering import paused, until

from kvreclaim import LLM, SamplingParams
from kvreclaim.server.anthropic.fields import (
    ConversationFields,
    MessageRequest,
    TextBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)
from kvreclaim.server.anthropic.schemas import AnsweredMessage, TokensCount

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}{{ m.tool_call_id or '' }}: {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}"
    "{% if style is defined %}<{{ style }}>{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "the end of the story"}]
RENDERED = "user: the end of the story\nassistant: "
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
DEFINITION = (
    '[{"type": "function", "function": {"name": "weather", "description": "of a city", '
    '"parameters": {"type": "object"}}}]\n'
)
USE = {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Bern"}}
CALL = (
    '[{"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}]'
)
MARK = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def own(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    """A template that shows all that it is given, and requests run by priority."""
    llm = LLM(tiny_dir("llama"), num_blocks=512, max_num_seqs=1, scheduling_policy="priority")
    with running_server(llm, chat_template=TEMPLATE) as running:
        yield running


def post(server: Running, path: str = "", **fields: Any) -> httpx2.Response:
    """Greedy unless the fields say otherwise."""
    body = {"model": MODEL, "messages": HELLO, **fields}
    if not path:
        body = {"max_tokens": 12, "temperature": 0.0, **body}
    content, headers = json.dumps(body), {"content-type": "application/json"}
    return httpx2.post(f"{server.base_url}/v1/messages{path}", content=content, headers=headers, timeout=60)


def answer(server: Running, **fields: Any) -> AnsweredMessage:
    response = post(server, **fields)
    assert response.status_code == 200, response.text
    return AnsweredMessage.model_validate(response.json())


def text(server: Running, **fields: Any) -> str:
    (block,) = answer(server, **fields).content
    return block.text


def refused(server: Running, path: str = "", **fields: Any) -> str:
    """What a 400 says."""
    response = post(server, path, **fields)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    return body["error"]["message"]


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
}


@pytest.mark.parametrize("name", PROMPTS)
def test_what_shapes_the_prompt(own: Running, tiny_oracle: LLM, name: str):
    fields, prompt = PROMPTS[name]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    assert text(own, **fields) == tiny_oracle.generate(prompt, greedy)[0].outputs[0].text
    counted = TokensCount.model_validate(post(own, "/count_tokens", **fields).json())
    assert counted.input_tokens == len(tiny_oracle.tokenizer.encode(prompt))


# What shapes the answer: the engine's with the same settings, and another one than without.

SAMPLED = {
    "max_tokens": ({"max_tokens": 3}, {"max_tokens": 3}),
    "temperature": ({"temperature": 3.0, "seed": 5}, {"temperature": 3.0, "seed": 5}),
    "temperature of its own accord is 1": ({"temperature": None, "seed": 5}, {"temperature": 1.0, "seed": 5}),
    "seed": ({"temperature": 3.0, "seed": 6}, {"temperature": 3.0, "seed": 6}),
    "top_k": ({"temperature": 9.0, "top_k": 3, "seed": 5}, {"temperature": 9.0, "top_k": 3, "seed": 5}),
    "top_p": ({"temperature": 9.0, "top_p": 0.2, "seed": 5}, {"temperature": 9.0, "top_p": 0.2, "seed": 5}),
    "min_p": ({"temperature": 9.0, "min_p": 0.5, "seed": 5}, {"temperature": 9.0, "min_p": 0.5, "seed": 5}),
    "repetition_penalty": ({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
    "presence_penalty": ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
    "frequency_penalty": ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
    "logit_bias": ({"logit_bias": {"65": 100.0}}, {"logit_bias": {65: 100.0}}),
    "stop_sequences": ({"stop_sequences": ["j"]}, {"stop": ["j"]}),
    "min_tokens": ({"stop_sequences": ["j"], "min_tokens": 8}, {"stop": ["j"], "min_tokens": 8}),
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
    assert "kv_compression.stats" in refused(server, kv_compression={"stats": "/etc/passwd"})


def test_cache_salt(own: Running):
    messages = [{"role": "user", "content": "salt and pepper " * 4}]

    def read(**fields: Any) -> int:
        return answer(own, messages=messages, **fields).usage.cache_read_input_tokens

    assert read(cache_salt="a") == 0
    assert read(cache_salt="a") > 0
    assert read(cache_salt="b") == 0
    assert read() == 0


def test_priority(own: Running):
    """Of two that wait, the one with the lower number runs first."""
    ended: list[int] = []

    class Watcher:
        added = stepped = staticmethod(lambda *_: None)

        def ended(self, _: object, request: Any) -> None:
            ended.append(request.priority)

    engine = own.service.engine
    before = engine.observers
    engine.observers = (*before, Watcher())
    with paused(own):
        threads = []
        for number in (7, -3):
            threads.append(threading.Thread(target=post, args=(own,), kwargs={"priority": number}))
            threads[-1].start()
            until(lambda: engine.num_queued == len(threads))
    for thread in threads:
        thread.join()
    engine.observers = before
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


# Refusals

REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
    (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}]}
            ]
        },
        "'thinking'",
    ),
    ({"messages": [{"role": "user", "content": [USE]}]}, "content.0 is a tool_use block"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        "content.0 is a tool_result block",
    ),
    (
        {"messages": [*HELLO, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        "messages.1.content.0.tool_use_id is 'x'",
    ),
    ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]}, "ends with a tool_use"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "citations": []}]}]},
        "citations",
    ),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [{**TOOL, "strict": True}]}, "tools.0.strict"),
    ({"tools": [TOOL, TOOL]}, "'weather' twice"),
    ({"tool_choice": {"type": "auto"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "disable_parallel",
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"thinking": {"type": "adaptive"}}, "thinking.type"),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, "thinking"),
    ({"chat_template_kwargs": {"colour": 1}}, "'colour'"),
    ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_tokens": 13}, "min_tokens"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias"),
    ({"metadata": {"user": "x"}}, "metadata.user"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a"),
    ({"tools": [{**TOOL, "input_schema": {"a": "\ud800"}}]}, "half of a"),
    *(
        ({name: value}, name)
        for name, value in {
            "service_tier": "auto",
            "container": "x",
            "context_management": {},
            "mcp_servers": [],
            "output_config": {},
            "output_format": {},
            "inference_geo": "eu",
            "speed": "fast",
            "diagnostics": {},
            "user_profile_id": "x",
            "n": 2,
            "stop": ["x"],
            "logprobs": 1,
        }.items()
    ),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_name_the_field(own: Running, fields: dict[str, Any], named: str):
    body = {key: value for key, value in fields.items() if value is not None}
    if len(body) < len(fields):
        whole = {"model": MODEL, "max_tokens": 12, "messages": HELLO}
        whole = {key: value for key, value in whole.items() if key not in fields}
        response = httpx2.post(f"{own.base_url}/v1/messages", json=whole)
        assert response.status_code == 400
        assert named in response.json()["error"]["message"]
    else:
        assert named in refused(own, **body)


def test_count_tokens_takes_what_makes_the_prompt_and_no_more(own: Running):
    assert "max_tokens is not supported here" in refused(own, "/count_tokens", max_tokens=1)
    assert "stream is not supported here" in refused(own, "/count_tokens", stream=True)
    assert post(own, "/count_tokens", model="other").status_code == 404


def test_thinking_needs_a_switch_in_the_template(tiny_server: Running):
    assert "thinking is 'disabled', but the model's chat template has no switch" in refused(
        tiny_server, thinking={"type": "disabled"}
    )


def test_tools_need_a_place_in_the_template(tiny_server: Running):
    assert "no place for them" in refused(tiny_server, tools=[TOOL])


def test_the_clients_headers_are_accepted(own: Running):
    client = anthropic.Anthropic(
        base_url=own.base_url, api_key="x", default_headers={"anthropic-beta": "prompt-caching-2024-07-31"}
    )
    message = client.messages.create(model=MODEL, max_tokens=3, messages=HELLO)
    assert message.usage.output_tokens == 3


def test_no_field_is_missing_here():
    """A field that is added must be added to the tables above."""
    tested = {name.partition(" ")[0] for name in PROMPTS} | {name for f, _ in PROMPTS.values() for name in f}
    tested |= {name for fields, _ in SAMPLED.values() for name in fields}
    tested |= {"model", "stream", "ignore_eos", "kv_compression", "cache_salt", "priority", "metadata"}
    assert set(MessageRequest.model_fields) <= tested
    assert set(ConversationFields.model_fields) <= tested
    blocks = {
        TextBlock: "text citations",
        ToolUseBlock: "id name input",
        Tool: "name description input_schema",
    }
    blocks[ToolResultBlock] = "tool_use_id content is_error"
    for model, names in blocks.items():
        assert set(model.model_fields) == {"type", "cache_control", *names.split()}
