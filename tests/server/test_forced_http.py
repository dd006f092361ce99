"""Forced and strict calls over HTTP: a model that writes at random writes whatever its grammar allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import jsonschema_rs
import openai
import pytest
import tiny
from llguidance.hf import from_tokenizer
from running import MODEL, Running, openai_client, running_server
from scribbling import TERSE, save_scribbler
from tokenizers import AddedToken

from kvreclaim import LLM
from kvreclaim.parsers.formats import TOOL_PARSERS
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.shared.output_format import output_format

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Basel"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]
MESSAGES = [{"role": "user", "content": "What is the weather?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = LLM(save_scribbler(tmp_path_factory.mktemp("scribbler")), num_blocks=512)
    with running_server(llm, tool_call_parser="hermes") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def other(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(params=[*TOOL_PARSERS, None])
def form(server: Running, request: pytest.FixtureRequest) -> str | None:
    set_parsers(server, request.param)
    return request.param


def set_parsers(server: Running, name: str | None, *, reasoning: str | None = None) -> None:
    """Let the server write and read calls and reasoning in these formats from now on."""
    known = server.service.output_format
    form = replace(known, tool_parser=name, reasoning_parser=reasoning)
    server.service.__dict__["output_format"] = form


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": TOOLS,
        "max_tokens": 300,
        "seed": 1,
        "logit_bias": TERSE,
    }
    return client.chat.completions.create(**{**given, **fields})


def check_calls(calls: list[Any]) -> None:
    for call in calls:
        assert jsonschema_rs.is_valid(SCHEMAS[call.function.name], json.loads(call.function.arguments)), call


def test_required_whole_and_streamed(client: openai.OpenAI, form: str | None) -> None:
    """None: the model has no format, and calls are a JSON array."""
    for choice in ask(client, tool_choice="required", parallel_tool_calls=False, n=3).choices:
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert len(choice.message.tool_calls) == 1
        check_calls(choice.message.tool_calls)
    fields = {"tool_choice": NAMED, "temperature": 2.0}
    (call,) = ask(client, **fields).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    check_calls([call])
    choices = [chunk.choices[0] for chunk in ask(client, **fields, stream=True)]
    parts = [part.function for each in choices for part in each.delta.tool_calls or ()]
    assert "".join(part.arguments for part in parts) == call.function.arguments
    assert (parts[0].name, choices[-1].finish_reason) == ("get_weather", "tool_calls")
    assert not any(each.delta.content for each in choices)


@pytest.mark.parametrize("reasoning", ["think", "harmony"])
def test_an_array_behind_reasoning(client: openai.OpenAI, server: Running, reasoning: str) -> None:
    """Harmony knows no array: its own calls are forced, whatever the tool parser."""
    set_parsers(server, None, reasoning=reasoning)
    how = {"chat_template_kwargs": {"begin": False}}
    message = ask(client, tool_choice=NAMED, extra_body=how).choices[0].message
    check_calls(message.tool_calls)
    assert message.content is None


def test_without_being_forced_an_array_is_text(client: openai.OpenAI, server: Running) -> None:
    set_parsers(server, None)
    text = '[{"name": "now", "parameters": {}}]'
    extra = {"structured_outputs": {"choice": [text]}}
    for choice in ("auto", "none"):
        message = ask(client, tool_choice=choice, extra_body=extra).choices[0].message
        assert (message.content, message.tool_calls) == (text, None)


def test_several_calls_and_allowed_tools(client: openai.OpenAI, server: Running) -> None:
    set_parsers(server, "kimi_k2")
    message = ask(client, tool_choice="required").choices[0].message
    check_calls(message.tool_calls)
    for mode, names in (("required", {"now"}), ("auto", {"get_weather"})):
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        bias = {**TERSE, str(token_of(server, "<|tool_calls_section_begin|>")): 100.0}
        given = {"tool_choice": choice, "parallel_tool_calls": False, "logit_bias": bias}
        given["tools"] = [*map(strict, TOOLS)]
        message = ask(client, **given).choices[0].message
        assert {call.function.name for call in message.tool_calls} == names


def test_strict_calls_of_a_model_that_may_write_text(client: openai.OpenAI, server: Running) -> None:
    """The bias makes it open a call; the schema does the rest, of the strict function alone."""
    for name, opening in (("kimi_k2", "<|tool_calls_section_begin|>"), ("mistral", "[TOOL_CALLS]")):
        set_parsers(server, name)
        bias = {**TERSE, str(token_of(server, opening)): 100.0}
        tools = [strict(TOOLS[0]), TOOLS[1]]
        for seed in range(3):
            fields = {"tools": tools, "logit_bias": bias, "parallel_tool_calls": False, "seed": seed}
            (choice,) = ask(client, **fields).choices
            for call in choice.message.tool_calls or ():
                if call.function.name == "get_weather":
                    check_calls([call])
            assert choice.message.tool_calls or choice.finish_reason == "length"
        text = ask(client, tools=tools, max_tokens=5).choices[0].message
        assert text.tool_calls is None
        assert text.content


@pytest.mark.parametrize("name", ["glm45", None])
def test_any_tool_and_strict_of_anthropic(
    other: anthropic.Anthropic, server: Running, name: str | None
) -> None:
    set_parsers(server, name)
    tools = [{"name": name, "input_schema": SCHEMAS[name], "strict": True} for name in SCHEMAS]
    fields = {"model": MODEL, "messages": MESSAGES, "tools": tools, "max_tokens": 300}
    extra = {"seed": 1, "logit_bias": TERSE}
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "get_weather"},
    ):
        message = other.messages.create(**fields, tool_choice=choice, extra_body=extra)
        with other.messages.stream(**fields, tool_choice=choice, extra_body=extra) as stream:
            streamed = stream.get_final_message()
        for each in (message, streamed):
            (use,) = each.content
            assert (use.type, each.stop_reason) == ("tool_use", "tool_use")
            assert use.name in (choice.get("name"), *([] if "name" in choice else SCHEMAS))
            assert jsonschema_rs.is_valid(SCHEMAS[use.name], use.input)


def test_structured_outputs_of_anthropic(other: anthropic.Anthropic, server: Running) -> None:
    set_parsers(server, "hermes")
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300}
    form = {"type": "json_schema", "schema": WEATHER}
    for more in ({"output_config": {"format": form}}, {"output_format": form}):
        message = other.messages.create(**fields, extra_body={**more, "seed": 1, "logit_bias": TERSE})
        assert jsonschema_rs.is_valid(WEATHER, json.loads(message.content[0].text))
        assert message.stop_reason == "end_turn"


def test_a_structured_answer_or_a_call(client: openai.OpenAI, server: Running) -> None:
    set_parsers(server, "kimi_k2")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
    opening = str(token_of(server, "<|tool_calls_section_begin|>"))
    for bias in (100.0, -100.0):
        fields = {
            "response_format": form,
            "tools": [*map(strict, TOOLS)],
            "logit_bias": {**TERSE, opening: bias},
            "parallel_tool_calls": False,
        }
        message = ask(client, **fields).choices[0].message
        if bias > 0:
            assert len(message.tool_calls) == 1
        else:
            assert jsonschema_rs.is_valid(WEATHER, json.loads(message.content))


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


def token_of(server: Running, name: str) -> int:
    return server.service.tokenizer.convert_tokens_to_ids(name)


ANY_OF = {"anyOf": [WEATHER]}
UNSET = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("name", "fields", "param"),
    [
        ("hermes", {"tool_choice": NAMED, "tools": openai.NOT_GIVEN}, "tool_choice"),
        (
            "hermes",
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
        ),
        ("hermes", {"tool_choice": {"type": "function", "function": {"name": ""}}}, "tool_choice"),
        (
            "hermes",
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": ""}}],
                    },
                }
            },
            "tool_choice",
        ),
        ("hermes", {"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        (
            "qwen3_coder",
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": ["a"]}}}
                ],
            },
            "tools.0.function.parameters",
        ),
        (
            "hermes",
            {
                "tool_choice": "required",
                "tools": [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": UNSET}}],
            },
            "tools.1.function.parameters",
        ),
        (
            "glm45",
            {
                "tools": [
                    strict(
                        {"type": "function", "function": {"name": "f", "parameters": {"anyOf": [WEATHER]}}}
                    )
                ]
            },
            "tools.0.function.parameters",
        ),
        (
            "mistral",
            {"tools": [strict({"type": "function", "function": {"name": "a b"}})]},
            "tools.0.function.name",
        ),
        (
            "hermes",
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            },
            "tools.0.function.parameters",
        ),
        ("hermes", {"tool_choice": "required", "extra_body": {"use_beam_search": True}}, "tool_choice"),
        (
            "hermes",
            {"tool_choice": NAMED, "extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
            "structured_outputs",
        ),
        (
            "hermes",
            {"tools": [strict(TOOLS[0])], "extra_body": {"use_beam_search": True}},
            "tools.0.function.strict",
        ),
        (
            "kimi_k2",
            {"tool_choice": "required", "extra_body": {"skip_special_tokens": True}},
            "skip_special_tokens",
        ),
        (
            None,
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [{"type": "function", "function": {"name": "now"}}],
                    },
                }
            },
            "tool_choice",
        ),
        (None, {"tools": [strict(TOOLS[0])]}, "tools.0.function.strict"),
    ],
    ids=str,
)
def test_refusals_name_the_place(
    client: openai.OpenAI, server: Running, name: str | None, fields: dict[str, Any], param: str
) -> None:
    set_parsers(server, name)
    given = {"logit_bias": openai.NOT_GIVEN, "seed": openai.NOT_GIVEN}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **given, **fields)
    assert refused.value.param == param
    assert refused.value.body["message"].endswith(".")


def test_special_tokens_are_those_that_llguidance_takes_for_such() -> None:
    """Added tokens count if they are special or in angle brackets."""
    tokenizer, names = tiny.tokenizer(), ("[X]", "<x", "x>", "<x>", "</x>", "<|x|>", "｜x｜", "<a b>")
    tokenizer.add_tokens([AddedToken(name, special=False) for name in names])
    known = output_format(tokenizer, ServerConfig(served_model_name=(MODEL,))).unwritten
    tokens = from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    assert set(names) < set(added)
    assert known == {name: number for name, number in added.items() if tokens.is_special_token(number)}


THINKING = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}


@pytest.mark.parametrize("begin", [False, True])
def test_a_structured_answer_behind_its_reasoning(
    client: openai.OpenAI, other: anthropic.Anthropic, server: Running, begin: bool
) -> None:
    """The model is made to think `end`, and to end its reasoning; the schema holds for what comes then."""
    set_parsers(server, "hermes", reasoning="think")
    words = [*([] if begin else ["<think>"]), "end", "</think>"]
    bias = {str(token_of(server, word)): 100.0 - 20 * place for place, word in enumerate(words)}
    how = {"repetition_penalty": 100.0, "chat_template_kwargs": {"begin": begin}}
    fields = {"logit_bias": {**TERSE, **bias}, "temperature": 0.0, "extra_body": how}
    message = ask(client, response_format=THINKING, tools=openai.NOT_GIVEN, **fields).choices[0].message
    assert message.reasoning_content == "end"
    assert jsonschema_rs.is_valid(WEATHER, json.loads(message.content))
    message = ask(client, tool_choice=NAMED, **fields).choices[0].message
    assert (message.reasoning_content, message.content) == ("end", None)
    check_calls(message.tool_calls)
    given = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300}
    form = {"format": {"type": "json_schema", "schema": WEATHER}}
    extra = {**how, "output_config": form, "logit_bias": {**TERSE, **bias}, "temperature": 0.0}
    thought, text = other.messages.create(**given, extra_body=extra).content
    assert thought.thinking == "end"
    assert jsonschema_rs.is_valid(WEATHER, json.loads(text.text))
