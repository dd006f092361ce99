"""/v1/responses through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from running import MODEL, openai_client, running_server
from scribbling import TERSE, save_scribbler
from speaking import CALL, biased

from kvreclaim import LLM

TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %} {{ m.content }}{% endfor %}"
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]


@pytest.fixture(scope="module")
def client(speaker: LLM) -> Iterator[openai.OpenAI]:
    with running_server(speaker, tool_call_parser="hermes") as server, openai_client(server) as client:
        yield client


def words(*output: str) -> dict[str, Any]:
    return {"extra_body": biased(*output)}


def test_an_agents_loop(client: openai.OpenAI) -> None:
    """A call, its result, and the answer: first by id, then by items."""
    first = client.responses.create(model=MODEL, input="w20", tools=TOOLS, **words(*CALL))
    [call] = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Bern"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "w30"}
    fields = {"model": MODEL, "tools": TOOLS, **words("look.")}
    by_id = client.responses.create(input=[result], previous_response_id=first.id, **fields)
    items = [{"role": "user", "content": "w20"}, *first.output, result]
    by_items = client.responses.create(input=items, **fields)
    assert by_id.output_text == by_items.output_text == "look."
    assert by_id.usage.input_tokens == by_items.usage.input_tokens


def test_the_clients_stream_helper(client: openai.OpenAI) -> None:
    """It checks that events fit together, and makes the response of them."""
    with client.responses.stream(
        model=MODEL, input="w20", tools=TOOLS, **words("Let", "me", "look.", *CALL)
    ) as stream:
        kinds = {event.type for event in stream}
        response = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert response.output_text == "Let me look."
    assert response.output[1].name == "weather"


def test_stored_responses(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="w20", **words("me"))
    assert client.responses.retrieve(made.id).output_text == made.output_text
    assert [item.type for item in client.responses.input_items.list(made.id)] == ["message"]
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


class Animal(BaseModel):
    kind: Literal["cat", "dog"]


def test_a_schema(tmp_path: Path) -> None:
    llm = LLM(save_scribbler(tmp_path), num_blocks=64)
    with running_server(llm, reasoning_parser="none") as server, openai_client(server) as client:
        given = {
            "model": MODEL,
            "input": "A cat.",
            "max_output_tokens": 60,
            "extra_body": {"logit_bias": TERSE},
        }
        assert isinstance(client.responses.parse(**given, text_format=Animal).output_parsed, Animal)
        form = {"type": "json_schema", "name": "animal", "schema": Animal.model_json_schema()}
        include = ["message.output_text.logprobs"]
        answer = client.responses.create(**given, text={"format": form}, include=include)
        logprobs = answer.output[0].content[0].logprobs
        assert b"".join(bytes(entry.bytes) for entry in logprobs).decode() == answer.output_text
