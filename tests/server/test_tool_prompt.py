"""Tools for chat templates that have no place for them: what Qwen2.5's own template would have written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import anthropic
import pytest
import tiny
import web
from running import MODEL, Running, openai_client, running_server
from speaking import CALL, biased, save_speaker
from transformers.utils.chat_template_utils import render_jinja_template

from kvreclaim import LLM
from kvreclaim.parsers.pieces import ToolCall, merged
from kvreclaim.server.shared.service import text_of

QWEN = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""  # noqa: E501
"""Qwen2.5-Instruct's chat template, Apache-2.0."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Wetter, Bärn",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "time")
]
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "And in Zürich?"}


def calling(*names: str, text: str = "") -> list[dict[str, Any]]:
    """A turn that calls, and the results."""
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {"city": "Genève"}}}
        for name in names
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": f"{name}: 7 °C"} for name in names]
    return [{"role": "assistant", "content": text, "tool_calls": calls}, *results]


CHATS = [
    [SYSTEM, USER],
    [SYSTEM, USER, *calling("weather")],
    [SYSTEM, USER, *calling("weather", "time", text="Let me look.")],
    [SYSTEM, USER, *calling("weather"), {"role": "assistant", "content": "7 °C."}, USER],
]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tiny.save_model("llama", tmp_path_factory.mktemp("bare"), max_position_embeddings=4096)
    return LLM(path, num_blocks=256, max_model_len=4096)


@pytest.fixture(scope="module")
def server(bare: LLM) -> Iterator[Running]:
    with running_server(bare, chat_template=CHATML) as server:
        yield server


@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "none now"])
@pytest.mark.parametrize("messages", CHATS)
def test_a_conversation_is_written_as_qwens_template_writes_it(server: Running, messages, tools) -> None:
    [expected], _ = render_jinja_template(
        [messages], chat_template=QWEN, tools=tools, add_generation_prompt=True
    )
    assert text_of(server.service, messages, tools=tools) == expected


def test_results_and_what_the_user_says_behind_them_are_one_turn(server: Running) -> None:
    text = text_of(server.service, [USER, *calling("weather"), USER], tools=TOOLS)
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nweather: 7 °C\n</tool_response>\nAnd in Zürich?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text.startswith("<|im_start|>system\n# Tools\n\nYou may call")


def test_a_template_without_a_system_role_has_them_with_the_user(bare: LLM) -> None:
    with running_server(bare.sibling(num_blocks=256), chat_template=STRICT) as server:
        text = text_of(server.service, [SYSTEM, USER, *calling("weather"), USER], tools=TOOLS)
        assert text.startswith("[user]Be brief.\n\n# Tools\n\nYou may call")
        assert "</tool_call>\n\nAnd in Zürich?[assistant]<tool_call>\n" in text
        assert text.endswith("[user]<tool_response>\nweather: 7 °C\n</tool_response>\nAnd in Zürich?")


SAY = "{% for m in messages %} {{ m.content }}{% endfor %}"
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(save_speaker(tmp_path_factory.mktemp("speaker"), SAY), num_blocks=64)


def test_both_dialects_take_them_and_look_for_calls(speaker: LLM) -> None:
    user = [{"role": "user", "content": "w20 w21"}]
    with running_server(speaker) as server:
        splitter = server.service.output_format.splitter([20], {"weather": {}}, one_call=False)
        assert merged(splitter.take(" ".join(CALL), last=True)) == [ToolCall("weather", '{"city":"Bern"}')]
        given: dict[str, Any] = {"model": MODEL, "extra_body": biased("look.")}
        with openai_client(server) as client:
            turns = [*user, *_answered(calling("weather")), *user]
            for more in ({"tools": [FUNCTION]}, {"tools": [FUNCTION], "tool_choice": "none"}, {}):
                answer = client.chat.completions.create(**given, messages=turns, **more)
                assert answer.choices[0].message.content == "look."
        with anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0) as client:
            tools = [{"name": "weather", "input_schema": {"type": "object"}, "eager_input_streaming": True}]
            message = client.messages.create(**given, max_tokens=20, messages=user, tools=tools)
            assert message.content[0].text == "look."


def _answered(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as a client sends it: arguments are text."""
    turns = deepcopy(turns)
    for call in turns[0]["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return turns


@pytest.mark.parametrize("parser", ["none", "mistral"])
def test_another_parser_leaves_no_place_for_tools(speaker: LLM, parser: str) -> None:
    with running_server(speaker.sibling(num_blocks=64), tool_call_parser=parser) as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "w20"}], "tools": [FUNCTION]}
        answer = web.post(f"{server.base_url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "no place for them" in answer.json()["error"]["message"]


def test_a_breakpoint_on_a_tool_covers_the_tools_before_it(server: Running) -> None:
    """The last tool's definition is another one: all before it is served from the cache."""

    def read(description: str) -> int:
        tools = [
            {"name": name, "description": "a" * 400, "input_schema": {"type": "object"}} for name in "ab"
        ]
        tools[0]["cache_control"] = {"type": "ephemeral"}
        tools[1]["description"] = description
        body = {"model": MODEL, "max_tokens": 1, "messages": [USER], "tools": tools, "system": "Be brief."}
        answer = web.post(f"{server.base_url}/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["cache_read_input_tokens"]

    assert read("b") == 0
    assert read("c" * 40) > 400
