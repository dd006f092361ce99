"""Structured outputs over HTTP: response_format and structured_outputs, with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from running import MODEL, openai_client, running_server

from kvreclaim import LLM

MESSAGES = [{"role": "user", "content": "A cat of three years."}]


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=99)


SCHEMA = {
    "name": "animal",
    "strict": True,
    "schema": {**Animal.model_json_schema(), "additionalProperties": False},
}

ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}, "required": ["x"]}


@pytest.fixture(scope="module")
def client(real_dir: Path) -> Iterator[openai.OpenAI]:
    llm = LLM(real_dir, num_blocks=96, max_model_len=512)
    with running_server(llm) as server, openai_client(server) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=200, seed=1, **fields)


def test_json_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": SCHEMA}
    choices = chat(client, response_format=form, n=3, temperature=1.5).choices
    assert all(choice.finish_reason == "stop" for choice in choices)
    for choice in choices:
        Animal.model_validate_json(choice.message.content)
    text = "".join(
        chunk.choices[0].delta.content or "" for chunk in chat(client, response_format=form, stream=True)
    )
    Animal.model_validate_json(text)


def test_parse_of_the_clients_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, max_tokens=60, seed=2, response_format=Animal
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)


def test_json_object(client: openai.OpenAI) -> None:
    choice = chat(client, response_format={"type": "json_object"}, logprobs=True).choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("given", "texts"),
    [({"choice": ["left", "right"]}, ("left", "right")), ({"regex": "[0-1]{2}"}, ("00", "01", "10", "11"))],
)
def test_structured_outputs_of_both_routes(
    client: openai.OpenAI, given: dict[str, Any], texts: tuple[str, ...]
) -> None:
    body = {
        "structured_outputs": given,
        "kv_compression": {"policy": "streaming_llm", "budget": 32, "recent": 8},
    }
    assert chat(client, extra_body=body).choices[0].message.content in texts
    answer = client.completions.create(model=MODEL, prompt="Turn " * 60, max_tokens=8, extra_body=body)
    assert answer.choices[0].text in texts


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "strin"}},
                }
            },
            "response_format.json_schema.schema",
            "Invalid type: strin",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ENDLESS}}},
            "response_format.json_schema.schema",
            "no JSON value follows it",
        ),
        (
            {"extra_body": {"structured_outputs": {"regex": r"a[^\s\S]"}}},
            "structured_outputs.regex",
            "no text follows it",
        ),
        (
            {"extra_body": {"structured_outputs": {"grammar": 'root ::= "a" root'}}},
            "structured_outputs.grammar",
            "never ends",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": ENDLESS}}],
                "tool_choice": "required",
            },
            "tools.0.function.parameters",
            "each value would contain another one",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.name", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        (
            {"response_format": {"type": "text", "json_schema": SCHEMA}},
            "response_format.json_schema",
            "the type is 'text'",
        ),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "has nothing"),
        ({"extra_body": {"structured_outputs": {"json": None}}}, "structured_outputs", "has nothing"),
        (
            {"extra_body": {"structured_outputs": {"json": "{}", "regex": "a"}}},
            "structured_outputs",
            "has json and regex",
        ),
        (
            {"extra_body": {"structured_outputs": {"regex": "(a"}}},
            "structured_outputs.regex",
            "unclosed group",
        ),
        ({"extra_body": {"structured_outputs": {"regx": "a"}}}, "structured_outputs.regx", "not supported"),
        ({"extra_body": {"structured_outputs": {"regex": 1}}}, "structured_outputs.regex", "is a int"),
        (
            {
                "response_format": {"type": "json_object"},
                "extra_body": {"structured_outputs": {"regex": "a"}},
            },
            "response_format",
            "both set",
        ),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"use_beam_search": True}},
            "response_format",
            "use_beam_search",
        ),
    ],
)
def test_refusals_name_the_place(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)
    assert caught.value.param == param
    assert message in str(caught.value)


def wide(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"json": wide(401)}, "an object of 401 properties"),
        ({"json": json.dumps({"items": [wide(401)]})}, "an object of 401 properties"),
        ({"choice": [str(n) for n in range(4097)]}, "4097 texts"),
    ],
    ids=["object", "text", "choice"],
)
def test_what_costs_too_much_is_refused(client: openai.OpenAI, given: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named) as refused:
        chat(client, extra_body={"structured_outputs": given})
    assert refused.value.param.startswith("structured_outputs")


def test_a_function_that_costs_too_much_is_refused(client: openai.OpenAI) -> None:
    function = {"name": "f", "parameters": wide(401)}
    with pytest.raises(openai.BadRequestError, match="401 properties") as refused:
        chat(client, tools=[{"type": "function", "function": function}], tool_choice="required")
    assert refused.value.param == "tools.0.function.parameters"


def test_a_grammar_that_fails_on_the_way_leaves_no_text_in_the_log(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be followed to its end"):
        chat(client, extra_body={"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,1000}"}})
    assert "cannot be followed to its end" in caplog.text
    assert "a{1,1000}" not in caplog.text


CONFLICTS: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {"choice": ["cat"]}, "allowed_token_ids": [1]}, "allowed_token_ids", "allowed_"),
    ({"structured_outputs": {"regex": "[a]+"}, "bad_words": ["a", "aa", "aaa", "aaaa"]}, "bad_words", "bad_"),
    (
        {"structured_outputs": {"choice": ["a"]}, "stop_token_ids": [*range(1000)], "min_tokens": 20},
        "min_tokens",
        "min_tokens",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), CONFLICTS)
@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_leave_no_token_are_named(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    with pytest.raises(openai.APIError, match=rf"{message}.*leave no token that may come") as refused:
        list(chat(client, extra_body=fields, stream=stream))
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_an_answer_ends_where_its_grammar_may_end_and_nothing_else_may_come(client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"regex": "a|ab"}, "bad_words": ["b", "ab"], "min_tokens": 5}
    choice = chat(client, extra_body=body).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("a", "stop")
