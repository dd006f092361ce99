"""What /v1/messages does not take is a 400 that names it."""

from __future__ import annotations

from typing import Any

import pytest
import web
from bare_messages import HELLO, TOOL, USE, post, refused
from running import MODEL, Running

REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"temprature": 1}, "temprature is not supported here; did you mean temperature?"),
    ({"kv_compression": {"ratio": 1}}, "kv_compression.ratio is not supported here; remove it."),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "type 'image' is not supported here; pass one of 'text', ",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
    (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": ""}]}
            ]
        },
        "ends with a thinking",
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
    ({"tools": [{**TOOL, "strict": True}]}, "tools.0.strict needs a format of calls"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "format needs an end-of-seq",
    ),
    ({"tools": [TOOL, TOOL]}, "'weather' twice"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice needs an end-of-seq"),
    ({"tool_choice": {"type": "any"}}, "tool_choice is 'any', but there are no tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "weather"}}, "tool_choice.name is for"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name is 'f'"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format has no schema"),
    ({"output_format": {"type": "json_schema", "schema": {}, "name": "x"}}, "output_format"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "strin"}}}, "output_format.schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"thinking": {"type": "adaptive"}}, "thinking"),
    ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, "thinking"),
    ({"chat_template_kwargs": {"colour": 1}}, "'colour'"),
    ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_tokens": 13}, "min_tokens"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias"),
    ({"logit_bias": {f"{i % 256:0{3 + i // 256}}": 1.0 for i in range(1025)}}, "logit_bias"),
    ({"metadata": {"user": "x"}}, "metadata.user"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
    ({"tools": [{**TOOL, "input_schema": {"a": "\ud800"}}]}, "lone surrogate"),
    *(
        ({name: value}, name)
        for name, value in {
            "service_tier": "priority",
            "container": "x",
            "context_management": {},
            "mcp_servers": [],
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


@pytest.mark.parametrize("part", ["system", "text", "thinking", "input", "tool_result", "tools"])
def test_what_is_far_too_long_is_refused_before_it_is_rendered(own: Running, part: str) -> None:
    text = "a" * (own.service.max_chars + 1)
    use = {**USE, "input": {"a": [{"b": text}]} if part == "input" else {}}
    result = {"type": "tool_result", "tool_use_id": USE["id"], "content": "r"}
    if part == "tool_result":
        result["content"] = [{"type": "text", "text": text}]
    thought = {"type": "thinking", "thinking": text if part == "thinking" else "t"}
    messages = [
        {"role": "user", "content": text if part == "text" else "u"},
        {"role": "assistant", "content": [thought, use]},
        {"role": "user", "content": [result]},
    ]
    schema = {"description": text} if part == "tools" else {}
    more = {"system": text if part == "system" else "s", "tools": [{**TOOL, "input_schema": schema}]}
    for path in ("", "/count_tokens"):
        message = refused(own, path, messages=messages, **more)
        assert message.startswith(f"prompt is too long: {'tools' if part == 'tools' else 'messages'} has ")
        assert "characters" in message


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_name_the_field(own: Running, fields: dict[str, Any], named: str):
    body = {key: value for key, value in fields.items() if value is not None}
    if len(body) < len(fields):
        whole = {"model": MODEL, "max_tokens": 12, "messages": HELLO}
        whole = {key: value for key, value in whole.items() if key not in fields}
        response = web.post(f"{own.base_url}/v1/messages", json=whole)
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
