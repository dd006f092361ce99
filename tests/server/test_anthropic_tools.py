"""Tool use in /v1/messages, with `--tool-call-parser hermes`, through Anthropic's own client."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import jiter
import pytest
from pydantic_core import to_json
from running import MODEL, running_server
from speaking import CALL, MISTRAL_CALL, biased

from kvreclaim import LLM
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd
from kvreclaim.server.anthropic.answer import content_blocks

TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %} {{ m.content }}"
    "{% for call in m.tool_calls or [] %} calls {{ call.function.name }} {{ call.function.arguments.city }}"
    "{% endfor %}{% endfor %}"
)
TOOLS = [{"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}]
USER = [{"role": "user", "content": "w20 w21"}]


@pytest.fixture(scope="module")
def client(speaker: LLM) -> Iterator[anthropic.Anthropic]:
    with (
        running_server(speaker, tool_call_parser="hermes") as server,
        anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0) as client,
    ):
        yield client


def body(*words: str, **more: Any) -> dict[str, Any]:
    given = {"model": MODEL, "max_tokens": 20, "messages": USER, "tools": TOOLS, "extra_body": biased(*words)}
    return {name: value for name, value in {**given, **more}.items() if value is not None}


def test_a_call(client: anthropic.Anthropic):
    message = client.messages.create(**body(*CALL))
    [use] = message.content
    assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Bern"})
    assert use.id.startswith("toolu_")
    assert message.stop_reason == "tool_use"


def test_text_and_a_call_in_a_stream(client: anthropic.Anthropic):
    """Block by block, and no part of a tag is ever shown as text."""
    with client.messages.stream(**body("Let", "me", "look.", *CALL)) as stream:
        events = [event for event in stream if event.type not in ("text", "input_json")]
        final = stream.get_final_message()
    assert [(block.type, getattr(block, "text", None)) for block in final.content] == [
        ("text", "Let me look."),
        ("tool_use", None),
    ]
    assert final.content[1].input == {"city": "Bern"}
    assert final.stop_reason == "tool_use"
    order = [(event.type, event.index) for event in events if event.type.startswith("content_block")]
    assert order[0] == ("content_block_start", 0)
    end = order.index(("content_block_stop", 0))
    assert set(order[1:end]) == {("content_block_delta", 0)}
    assert order[end + 1 :] == [
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
    ]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert json.loads(deltas[-1].partial_json) == {"city": "Bern"}


def test_a_call_that_was_cut_off_before_its_arguments_is_text(client: anthropic.Anthropic):
    message = client.messages.create(**body(*CALL, max_tokens=2))
    assert [(block.type, block.text) for block in message.content] == [("text", " ".join(CALL[:2]))]
    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize("more", [{"tool_choice": {"type": "none"}}, {"tools": None}])
def test_without_tools_it_is_text(client: anthropic.Anthropic, more: dict[str, Any]):
    message = client.messages.create(**body(*CALL, **more))
    assert [(block.type, block.text) for block in message.content] == [("text", " ".join(CALL))]
    assert message.stop_reason == "end_turn"


def test_without_a_parser_it_is_text(speaker: LLM, client: anthropic.Anthropic):
    """tool_use is a promise of the server's own: by default its answers are as the model wrote them."""
    with (
        running_server(speaker.sibling(num_blocks=64)) as server,
        anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0) as plain,
    ):
        message = plain.messages.create(**body(*CALL))
    assert [(block.type, block.text) for block in message.content] == [("text", " ".join(CALL))]
    assert message.stop_reason == "end_turn"


def test_an_answer_with_a_call_can_be_sent_back(client: anthropic.Anthropic, speaker: LLM):
    answer = client.messages.create(**body("Let", *CALL))
    use = answer.content[1]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "w30"}
    messages = [
        *USER,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    final = client.messages.create(**body("look.", messages=messages))
    assert final.content[0].text == "look."
    definition = (
        '[{"type": "function", "function": {"name": "weather", "description": "of a city", '
        '"parameters": {"type": "object"}}}]'
    )
    prompt = f"{definition} w20 w21 Let calls weather Bern w30"
    usage = final.usage
    whole = usage.input_tokens + usage.cache_read_input_tokens
    assert whole == len(speaker.tokenizer.encode(prompt, add_special_tokens=False))


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"city": "Bern"}, " calls weather Bern"),
        ('{"city": "Bern"}', " calls weather Bern"),
        ("", " calls weather "),
        (None, " calls weather "),
        ('{"city": "Be', '\n{"name": "weather", "arguments": {"city": "Be'),
    ],
)
def test_inputs_of_the_conversation_that_clients_write(
    client: anthropic.Anthropic, speaker: LLM, given: Any, written: str
):
    """Objects, their texts as streams have them, and one that max_tokens cut off, which the model reads."""
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": given}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "w30"}
    messages = [*USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**body("look.", messages=messages, tools=None))
    usage = answer.usage
    whole = usage.input_tokens + usage.cache_read_input_tokens
    prompt = f" w20 w21 {written} w30"
    assert whole == len(speaker.tokenizer.encode(prompt, add_special_tokens=False))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"city": "Be',
        '{"a": [1, {"b": "c", "d": "e',
        '{"a": -1',
        '{"a": "x", "b": tr',
        '{"a": "x", "b"',
        '{"a": "\\u12',
    ],
)
def test_a_call_that_was_cut_off_has_the_input_that_clients_read_from_a_stream(text: str):
    wanted = jiter.from_json(text.encode(), partial_mode=True) if text else {}
    pieces = [CallBegin("f"), Arguments(text), CallEnd("", is_cut=True)]
    (block,) = content_blocks(pieces)
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", wanted)


def test_a_cut_call_with_a_number_that_no_float_holds():
    (block,) = content_blocks([CallBegin("f"), Arguments('{"x": -1e999, "y": 1'), CallEnd("", is_cut=True)])
    assert json.loads(to_json(block))["input"] == {"x": -sys.float_info.max, "y": 1}


def test_a_call_that_was_cut_off_is_the_same_in_a_stream(speaker: LLM):
    with (
        running_server(speaker.sibling(num_blocks=64), tool_call_parser="mistral") as server,
        anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0) as client,
    ):
        for more, reason in (
            ({"max_tokens": 2}, "max_tokens"),
            ({"stop_sequences": ["ern"]}, "stop_sequence"),
        ):
            message = client.messages.create(**body(*MISTRAL_CALL, **more))
            with client.messages.stream(**body(*MISTRAL_CALL, **more)) as stream:
                streamed = stream.get_final_message()
            for each in (message, streamed):
                (block,) = each.content
                assert (block.type, block.name, block.input) == ("tool_use", "weather", {})
                assert each.stop_reason == reason


def test_a_number_that_no_float_holds():
    pieces = [CallBegin("f"), Arguments('{"x": [-1e999, 10]}'), CallEnd()]
    (block,) = content_blocks(pieces)
    assert json.loads(to_json(block))["input"] == {"x": [-sys.float_info.max, 10]}
