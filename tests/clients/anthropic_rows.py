"""Anthropic's Python client."""

from __future__ import annotations

from typing import Any

import anthropic
from rows import SAY, WEATHER, At, City, Rows, check, check_text

ROWS = Rows()
SEEDED: dict[str, Any] = {"extra_body": {"seed": 1}}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
TOOL: dict[str, Any] = {"name": "weather", "description": "of a city", "input_schema": WEATHER}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "7 degrees"}
HISTORY = [
    *SAY,
    {"role": "assistant", "content": [USE]},
    {"role": "user", "content": [RESULT, {"type": "text", "text": "And now?"}]},
]


def client(at: At) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=at.url, api_key="any", max_retries=0, timeout=120)


def message(at: At, **fields: Any) -> anthropic.types.Message:
    with client(at) as each:
        return each.messages.create(**{"model": at.model, "messages": SAY, "max_tokens": 8, **fields})


@ROWS.add("anthropic", "messages")
def plain(at: At) -> None:
    check(message(at, system="Be brief.", stop_sequences=["\n\n\n"]).usage.output_tokens, "nothing")


@ROWS.add("anthropic", "messages, streamed")
def streamed(at: At) -> None:
    given: dict[str, Any] = {"model": at.model, "messages": SAY, "max_tokens": 8, **GREEDY}
    with client(at) as each, each.messages.stream(**given) as stream:
        check_text(message(at, **GREEDY).content[0].text, stream.text_stream)
        check(stream.get_final_message().stop_reason, "no reason")


@ROWS.add("anthropic", "tools, a call and its result beside text")
def tools(at: At) -> None:
    tool = {**TOOL, "eager_input_streaming": True}
    check(message(at, tools=[tool], messages=HISTORY).usage.output_tokens, "nothing")


@ROWS.add("anthropic", "cache_control, count_tokens")
def cached(at: At) -> None:
    system = [{"type": "text", "text": "lark dew " * 300, "cache_control": {"type": "ephemeral"}}]
    found = [message(at, system=system).usage for _ in range(2)]
    check(found[1].cache_read_input_tokens > 0, found)
    with client(at) as each:
        counted = each.messages.count_tokens(model=at.model, messages=SAY, system=system)
    usage = found[0]
    every = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    check(counted.input_tokens == every, counted)


def forced(at: At, choice: dict[str, Any], **fields: Any) -> None:
    made = message(at, tools=[{**TOOL, **fields}], tool_choice=choice, max_tokens=250, **SEEDED)
    used, *_ = [block for block in made.content if block.type == "tool_use"]
    check(used.input.keys() == WEATHER["properties"].keys(), made)


@ROWS.add("anthropic", "tool_choice any")
def any_tool(at: At) -> None:
    forced(at, {"type": "any"})


@ROWS.add("anthropic", "tool_choice of a tool, strict")
def one_tool(at: At) -> None:
    forced(at, {"type": "tool", "name": "weather"}, strict=True)


@ROWS.add("anthropic", "output_config with a JSON schema")
def output_format(at: At) -> None:
    schema = {"format": {"type": "json_schema", "schema": WEATHER}}
    made = message(at, output_config=schema, max_tokens=250, **SEEDED)
    City.model_validate_json(made.content[0].text)


if __name__ == "__main__":
    ROWS.main()
