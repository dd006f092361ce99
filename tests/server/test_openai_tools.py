"""Tool calls in /v1/chat/completions, with `--tool-call-parser hermes`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from running import MODEL, openai_client, running_server
from speaking import CALL, MISTRAL_CALL, biased

from kvreclaim import LLM
from kvreclaim.server.openai import messages

TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %} {{ m.content }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
USER = [{"role": "user", "content": "w20 w21"}]


@pytest.fixture(scope="module")
def client(speaker: LLM) -> Iterator[openai.OpenAI]:
    with running_server(speaker, tool_call_parser="hermes") as server, openai_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def mistral(speaker_dir: Path) -> Iterator[openai.OpenAI]:
    """Its format has a call's arguments in several of the tokens."""
    llm = LLM(speaker_dir, num_blocks=64)
    with running_server(llm, tool_call_parser="mistral") as server, openai_client(server) as client:
        yield client


def body(*words: str, **more: Any) -> dict[str, Any]:
    fields = biased(*words)
    penalty = {"repetition_penalty": fields.pop("repetition_penalty")}
    return {"model": MODEL, "messages": USER, "tools": TOOLS, **fields, "extra_body": penalty, **more}


def test_a_call(client: openai.OpenAI):
    choice = client.chat.completions.create(**body(*CALL)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Bern"}


def test_text_and_a_call_in_a_stream(client: openai.OpenAI):
    """No part of a tag is ever shown as text."""
    text, calls, reasons = "", [], []
    for chunk in client.chat.completions.create(**body("Let", "me", "look.", *CALL), stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        reasons.append(choice.finish_reason)
    assert text == "Let me look."
    [call] = calls
    assert (call.index, call.type, call.function.name) == (0, "function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_a_call_that_was_cut_off_before_its_arguments_is_text(client: openai.OpenAI):
    choice = client.chat.completions.create(**body(*CALL), max_tokens=2).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content == " ".join(CALL[:2])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "reason", "arguments"),
    [
        ({"max_tokens": 2}, "length", '{"city":'),
        ({"stop": ["ern"]}, "stop", '{"city": "B'),
    ],
)
def test_a_call_that_was_cut_off_has_its_arguments_so_far(
    mistral: openai.OpenAI, more: dict[str, Any], reason: str, arguments: str, stream: bool
):
    fields = body(*MISTRAL_CALL, **more)
    if stream:
        chunks = [chunk.choices[0] for chunk in mistral.chat.completions.create(**fields, stream=True)]
        parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
        assert not any(chunk.delta.content for chunk in chunks)
        assert [part.function.name for part in parts if part.function.name] == ["weather"]
        assert "".join(part.function.arguments for part in parts) == arguments
        assert chunks[-1].finish_reason == reason
        return
    choice = mistral.chat.completions.create(**fields).choices[0]
    assert (choice.finish_reason, choice.message.content) == (reason, None)
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "w30"}
    again = body("look.", messages=[*USER, choice.message, result])
    assert mistral.chat.completions.create(**again).choices[0].message.content == "look."


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"tools": None}])
def test_without_tools_it_is_text(client: openai.OpenAI, more: dict[str, Any]):
    choice = client.chat.completions.create(**body(*CALL, **more)).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert choice.message.content == " ".join(CALL)


def test_an_answer_with_a_call_can_be_sent_back(client: openai.OpenAI):
    message = client.chat.completions.create(**body(*CALL)).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "w30"}
    again = body("look.", messages=[*USER, message, result])
    assert client.chat.completions.create(**again).choices[0].message.content == "look."


def answered(client: openai.OpenAI, arguments: str) -> str:
    """The prompt of a turn behind a call with these arguments, its words in order."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "w30"}
    answer = client.chat.completions.create(
        **body("look.", messages=[*USER, {"role": "assistant", "tool_calls": [call]}, result])
    )
    return answer.choices[0].message.content


@pytest.mark.parametrize("arguments", ['{"city": 1e999}', "", "  ", "null"])
def test_arguments_of_the_conversation_that_clients_write(client: openai.OpenAI, arguments: str):
    """Numbers that no float holds; servers that write a call without arguments so."""
    assert answered(client, arguments) == "look."


@pytest.mark.parametrize("arguments", ['{"city": "Be', '{"city": NaN}', "[1]"])
def test_a_broken_call_of_the_conversation_is_text(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, arguments: str
):
    written: list[Any] = []
    text_of = messages.text_of

    def noting(service: Any, conversation: Any, **options: Any) -> str:
        written.append(conversation)
        return text_of(service, conversation, **options)

    monkeypatch.setattr(messages, "text_of", noting)
    assert answered(client, arguments) == "look."
    turn = written[0][1]
    assert turn == {"role": "assistant", "content": f'{{"name": "weather", "arguments": {arguments}'}
