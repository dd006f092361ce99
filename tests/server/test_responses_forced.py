"""Forced calls and structured answers over /v1/responses: chat's, under this API's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from responding import ask, events, refused
from running import Running, running_server
from scribbling import TERSE, save_scribbler

from kvreclaim import LLM
from kvreclaim.server.responses import translate

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Basel"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CITY = {"type": "function", "name": "city", "parameters": PARAMETERS, "strict": True}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "additionalProperties": False}}
NAMED = {"type": "function", "name": "city"}
GIVEN: dict[str, Any] = {"input": "Hi", "max_output_tokens": 200, "seed": 1, "logit_bias": TERSE}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = LLM(save_scribbler(tmp_path_factory.mktemp("scribbler")), num_blocks=128)
    with running_server(llm, tool_call_parser="hermes", reasoning_parser="none") as server:
        yield server


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"city", "now"}),
        (NAMED, {"city"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [NAMED]}, {"city"}),
    ],
)
def test_a_forced_call(server: Running, choice: Any, names: set[str]) -> None:
    fields = {**GIVEN, "tools": [CITY, NOW], "tool_choice": choice, "parallel_tool_calls": False}
    whole, streamed = ask(server, **fields), events(server, **fields)[-1]["response"]
    assert whole["tool_choice"] == choice
    for response in (whole, streamed):
        [item] = response["output"]
        assert (item["type"], response["status"]) == ("function_call", "completed")
        assert item["name"] in names
        arguments = json.loads(item["arguments"])
        assert arguments.get("city") in ("Bern", "Basel") if item["name"] == "city" else not arguments
    assert whole["output"][0]["arguments"] == streamed["output"][0]["arguments"]


@pytest.mark.parametrize(
    ("more", "strict"),
    [
        ({}, [True, True]),
        ({"skip_special_tokens": True}, [True, True]),
        ({"tools": [{**CITY, "strict": None}, {**NOW, "parameters": {"not": {}}}]}, [True, False]),
        ({"tools": [{**CITY, "strict": None}, {**NOW, "name": "a b"}]}, [False, False]),
        ({"tools": [{**CITY, "strict": False}, NOW]}, [False, True]),
    ],
)
def test_functions_are_strict_where_they_can_be(
    server: Running, more: dict[str, Any], strict: list[bool]
) -> None:
    """A strict one among others with a name that no grammar has would be refused, so none is."""
    response = ask(
        server, **{**GIVEN, "tools": [{**CITY, "strict": None}, NOW], **more, "max_output_tokens": 4}
    )
    assert [tool["strict"] for tool in response["tools"]] == strict


@pytest.mark.parametrize(("wrong", "strict"), [(None, {True}), (2, {False})])
def test_of_many_functions_all_are_strict_or_none(
    server: Running, monkeypatch: pytest.MonkeyPatch, wrong: int | None, strict: set[bool]
) -> None:
    monkeypatch.setattr(translate, "MOST_ALONE", 3)
    tools = [{**NOW, "name": f"f{number}"} for number in range(4)]
    if wrong is not None:
        tools[wrong]["parameters"] = {"not": {}}
        param, message = refused(server, **{**GIVEN, "tools": tools, "tool_choice": "required"})
        assert param == f"tools.{wrong}.parameters", message
    response = ask(server, **{**GIVEN, "tools": tools, "max_output_tokens": 4})
    assert {tool["strict"] for tool in response["tools"]} == strict


def test_a_schema(server: Running) -> None:
    form = {"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": True}
    response = ask(server, **GIVEN, text={"format": form})
    [item] = response["output"]
    assert json.loads(item["content"][0]["text"])["city"] in ("Bern", "Basel")
    assert response["text"]["format"] == form


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CITY], "tool_choice": {"type": "function", "name": "cities"}}, "tool_choice.name"),
        (
            {
                "tools": [CITY],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "cities"}],
                },
            },
            "tool_choice.tools",
        ),
        ({"tools": [NOW, {**CITY, "parameters": {"not": {}}}]}, "tools.1.parameters"),
        ({"tools": [CITY], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
def test_a_refusal_names_this_apis_field(server: Running, body: dict[str, Any], param: str) -> None:
    named, message = refused(server, **GIVEN, **body)
    assert named == param
    assert ".function" not in message
