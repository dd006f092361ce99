"""Reasoning and special markers in answers of both dialects, found by the chat template."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest
import web
from running import MODEL, Running, openai_client, running_server
from speaking import MISTRAL_CALL, biased

from kvreclaim import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.base.config import ServerConfig

TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}"
    "{{ ' <think> ' + m.reasoning_content + ' </think>' if m.reasoning_content }} {{ m.content }}"
    "{% endfor %}{{ ' <think>' if begin }}{# [TOOL_CALLS] #}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
USER = [{"role": "user", "content": "w20 w21"}]
THOUGHT = ("<think>", "Let", "me", "</think>", "look.")


@pytest.fixture(scope="module")
def server(speaker: LLM) -> Iterator[Running]:
    with running_server(speaker) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def test_reasoning_is_apart_from_the_answer(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": USER, "extra_body": biased(*THOUGHT)}
    message = client.chat.completions.create(**fields).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me", "look.")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Let me"
    assert "".join(delta.content or "" for delta in deltas) == "look."


def test_reasoning_that_the_template_begins(client: openai.OpenAI) -> None:
    body = biased(*THOUGHT[1:]) | {"chat_template_kwargs": {"begin": True}}
    message = client.chat.completions.create(model=MODEL, messages=USER, extra_body=body).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me", "look.")


@pytest.mark.parametrize(
    ("stop", "content"), [("Let", "look."), (" ", "look."), ("look.", None), ("ok", "lo")]
)
def test_stop_strings_end_the_answer_only(server: Running, stop: str, content: str | None) -> None:
    """In all dialects, whole and streamed."""
    body = {"model": MODEL, **biased(*THOUGHT)}
    chat = f"{server.base_url}/v1/chat/completions"
    answer = web.post(chat, json=body | {"messages": USER, "stop": [stop]}).json()["choices"][0]
    assert (answer["message"]["reasoning_content"], answer["message"]["content"] or None) == (
        "Let me",
        content,
    )
    assert (answer["stop_reason"] == stop) is (content != "look.")
    request = body | {"messages": USER, "max_tokens": 20, "stop_sequences": [stop]}
    blocks = web.post(f"{server.base_url}/v1/messages", json=request).json()["content"]
    assert [block.get("thinking", block.get("text")) for block in blocks] == (
        ["Let me"] + ([] if content is None else [content])
    )
    answer = web.post(f"{server.base_url}/v1/responses", json=body | {"input": "w20", "stop": [stop]}).json()
    assert [item["type"] for item in answer["output"]][:1] == ["reasoning"]
    assert "".join(item["content"][0]["text"] for item in answer["output"][1:]) == (content or "")


def test_reasoning_that_is_continued(client: openai.OpenAI) -> None:
    turns = [*USER, {"role": "assistant", "content": "<think> w22"}]
    body = biased(*THOUGHT[1:]) | {"continue_final_message": True, "add_generation_prompt": False}
    for more, thought in (({}, "Let me"), ({"thinking_token_budget": 1}, "Let")):
        message = (
            client.chat.completions.create(model=MODEL, messages=turns, extra_body=body | more)
            .choices[0]
            .message
        )
        assert message.reasoning_content == thought
        assert message.content.endswith("look.")


def test_a_call_ends_the_reasoning(client: openai.OpenAI) -> None:
    body = biased("<think>", "Let", *MISTRAL_CALL)
    fields = {"model": MODEL, "messages": USER, "tools": TOOLS, "extra_body": body}
    choice = client.chat.completions.create(**fields).choices[0]
    assert (choice.message.reasoning_content, choice.finish_reason) == ("Let", "tool_calls")
    assert choice.message.tool_calls[0].function.name == "weather"


def test_a_name_that_the_format_cannot_hold(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "my weather"}}
    with pytest.raises(
        openai.BadRequestError, match="'my weather', which calls in this model's format, mistral, cannot"
    ) as got:
        client.chat.completions.create(model=MODEL, messages=USER, tools=[tool], extra_body=biased("look."))
    assert got.value.param == "tools.0.function.name"


def test_reasoning_can_be_sent_back(client: openai.OpenAI, speaker: LLM) -> None:
    thought = {"role": "assistant", "content": "look.", "reasoning_content": "Let me"}
    fields = {"model": MODEL, "messages": [*USER, thought, *USER], "extra_body": biased("me")}
    usage = client.chat.completions.create(**fields).usage
    prompt = "w20 w21 <think> Let me </think> look. w20 w21"
    assert usage.prompt_tokens == len(speaker.tokenizer.encode(prompt, add_special_tokens=False))


def test_thinking_blocks_whole_streamed_and_sent_back(server: Running, speaker: LLM) -> None:
    given = {"model": MODEL, "max_tokens": 20}
    with anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0) as client:
        fields = {**given, "messages": USER, "extra_body": biased(*THOUGHT)}
        message = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            streamed = stream.get_final_message()
        for content in (message.content, streamed.content):
            assert [block.type for block in content] == ["thinking", "text"]
            assert (content[0].thinking, content[1].text) == ("Let me", "look.")
        turns = [*USER, {"role": "assistant", "content": message.content}, *USER]
        usage = client.messages.create(**given, messages=turns, extra_body=biased("me")).usage
    prompt = "w20 w21 <think> Let me </think> look. w20 w21"
    whole = usage.input_tokens + usage.cache_read_input_tokens
    assert whole == len(speaker.tokenizer.encode(prompt, add_special_tokens=False))


def test_markers_that_are_special_tokens(client: openai.OpenAI) -> None:
    """Texts leave special tokens out; where a format needs them, the parser alone sees them."""
    fields = {"model": MODEL, "messages": USER, "extra_body": biased("look.", *MISTRAL_CALL)}
    for more in ({}, {"logprobs": True, "top_logprobs": 1}):
        choice = client.chat.completions.create(**fields, tools=TOOLS, **more).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("look.", "tool_calls")
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Bern"}')
    text = client.chat.completions.create(**fields).choices[0].message.content
    assert text == 'look. weather{"city": "Bern"}'


def test_a_streamed_call_is_begun_once(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": USER, "tools": TOOLS, "extra_body": biased(*MISTRAL_CALL)}
    calls = [
        call
        for chunk in client.chat.completions.create(**fields, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert [call.index for call in calls] == [0] * len(calls)
    assert calls
    assert (calls[0].function.name, calls[0].type) == ("weather", "function")
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    assert "".join(call.function.arguments for call in calls) == '{"city": "Bern"}'


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{name} is 'mermes'; it must be one of auto, none, "):
        ServerConfig(served_model_name=("m",), **{name: "mermes"})


def test_without_parsers_all_is_text(speaker: LLM) -> None:
    options = {"tool_call_parser": "none", "reasoning_parser": "none"}
    with running_server(speaker.sibling(num_blocks=64), **options) as server, openai_client(server) as client:
        fields = {"model": MODEL, "messages": USER, "tools": TOOLS, "extra_body": biased(*THOUGHT)}
        message = client.chat.completions.create(**fields).choices[0].message
    assert message.content == " ".join(THOUGHT)


def test_only_the_first_call_where_calls_are_not_parallel(client: openai.OpenAI, server: Running) -> None:
    """Text behind the first call is left out, streamed or not."""
    words = biased(*MISTRAL_CALL, "look.")
    fields = {"model": MODEL, "messages": USER, "tools": TOOLS, "extra_body": words}
    both = client.chat.completions.create(**fields).choices[0].message
    assert (both.content, len(both.tool_calls)) == ("look.", 1)
    one = client.chat.completions.create(**fields, parallel_tool_calls=False).choices[0]
    assert (one.message.content, len(one.message.tool_calls), one.finish_reason) == (None, 1, "tool_calls")
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    given = {"model": MODEL, "max_tokens": 20, "messages": USER, "tools": tools, "extra_body": words}
    with anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0) as other:
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        message = other.messages.create(**given, tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"]


def test_ordinary_fields_are_taken_and_null_is_as_good_as_absent(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": USER, "tool_choice": "auto", "parallel_tool_calls": True}
    ordinary = {"service_tier": "auto", "metadata": {"a": "b"}, "store": False, "modalities": ["text"]}
    ordinary |= {"prediction": {"type": "content", "content": "look."}, "verbosity": "medium"}
    absent = {"audio": None, "web_search_options": None, "functions": None}
    extra = biased("look.") | absent
    answer = client.chat.completions.create(**fields, **ordinary, extra_body=extra)
    assert answer.choices[0].message.content == "look."


EFFORT = "{% for m in messages %}{{ m.content }}{% endfor %} w3{{ '1' if enable_thinking else '2' }}"


@pytest.mark.parametrize(("effort", "word"), [("none", "w32"), ("high", "w31")])
def test_reasoning_effort_switches_thinking(speaker: LLM, effort: str, word: str) -> None:
    with (
        running_server(speaker.sibling(num_blocks=64), chat_template=EFFORT) as server,
        openai_client(server) as client,
    ):
        fields = {"model": MODEL, "messages": USER, "extra_body": biased("me") | {"return_token_ids": True}}
        answer = client.chat.completions.create(**fields, reasoning_effort=effort)
        prompt = answer.model_extra["prompt_token_ids"]
        assert speaker.tokenizer.decode(prompt).split()[-1] == word
        clash = {"chat_template_kwargs": {"enable_thinking": True}}
        with pytest.raises(openai.BadRequestError, match="both set"):
            client.chat.completions.create(
                model=MODEL, messages=USER, reasoning_effort=effort, extra_body=clash
            )
