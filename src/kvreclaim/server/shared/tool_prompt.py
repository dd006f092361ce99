"""Tools for a chat template without support for them: in the system prompt, in Hermes' format.

Tools, calls and results are written as in Qwen2.5's chat template. Parser: json_calls.py::HERMES.
Source: https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct, tokenizer_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

LEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call>"
)
TemplateMessages = list[dict[str, Any]]


def tools_text(tools: Sequence[dict[str, Any]]) -> str:
    """Describe the tools for the model; empty without any."""
    return LEAD + "\n".join(map(_json, tools)) + TAIL if tools else ""


def in_system(messages: TemplateMessages, text: str) -> TemplateMessages:
    """Append this text to the system prompt, which is added if missing."""
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]


def in_user(messages: TemplateMessages, text: str) -> TemplateMessages:
    """Prepend this text and the system prompt to the first user message."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    lead = "\n\n".join([*system, text])
    for at, message in enumerate(others):
        if message["role"] == "user":
            first = {**message, "content": f"{lead}\n\n{message['content']}"}
            return [*others[:at], first, *others[at + 1 :]]
    return [{"role": "user", "content": lead}, *others]


def plain_turns(messages: TemplateMessages) -> TemplateMessages:
    """Write calls and results as text. Results become user text, merged with what follows, because some
    templates require alternating roles."""
    turns: TemplateMessages = []
    is_result = False
    for message in messages:
        turn = _plain(message)
        if is_result and turn["role"] == "user":
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n{turn['content']}"}
        else:
            turns.append(turn)
        is_result = message["role"] == "tool"
    return turns


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    written = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    if not written:
        return message
    content = "\n".join([*filter(None, [message["content"]]), *written])
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _call(function: dict[str, Any]) -> str:
    call = {name: function[name] for name in ("name", "arguments")}
    return f"<tool_call>\n{_json(call)}\n</tool_call>"


def broken_call(name: str, arguments: str) -> str:
    """Write a call with invalid arguments, which templates do not accept as a call."""
    return f'{{"name": {_json(name)}, "arguments": {arguments}'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
