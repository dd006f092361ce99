"""/v1/chat/completions through OpenAI's own client: the model's template, roles, tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from running import MODEL, Running, openai_client, running_server

from kvreclaim import LLM, SamplingParams

MESSAGES = [{"role": "system", "content": "stop"}, {"role": "user", "content": "the end"}]
GREEDY = {"model": MODEL, "temperature": 0.0, "max_completion_tokens": 20}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Looks out of the window.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TEMPLATE = """\
{%- if tools %}tools={{ tools | tojson }};{% endif -%}
{%- for m in messages %}{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}:{{ m.content }}
{%- for call in m.tool_calls or [] %}!{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %};{% endfor %}{{ 'mood=' + mood + ';' if mood is defined else '' }}
{%- if add_generation_prompt %}assistant:{% endif %}"""
"""A template that writes every field of a conversation."""


@pytest.fixture(scope="module")
def templated(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    with running_server(LLM(tiny_dir("llama"), num_blocks=256), chat_template=TEMPLATE) as running:
        yield running


def prompt_of(server: Running, **fields) -> str:
    """Return the prompt that the model reads."""
    extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
    with openai_client(server) as client:
        answer = client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "extra_body": extra, **fields}
        )
    return server.llm.tokenizer.decode(answer.prompt_token_ids)


def expected_text(oracle: LLM, **params) -> list[str]:
    settings = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params})
    return [output.text for output in oracle.chat(MESSAGES, settings)[0].outputs]


def test_the_answer_is_the_engines(client: openai.OpenAI, tiny_oracle: LLM):
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == expected_text(tiny_oracle)[0]
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == len(tiny_oracle.chat(MESSAGES)[0].prompt_token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_a_stream_begins_with_the_role_and_ends_with_usage(client: openai.OpenAI, tiny_oracle: LLM):
    options = {"include_usage": True}
    request = {**GREEDY, "messages": MESSAGES, "stream": True, "stream_options": options}
    chunks = list(client.chat.completions.create(**request))
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in [first, *middle])
    assert text == expected_text(tiny_oracle)[0]
    reasons = [chunk.choices[0].finish_reason for chunk in [first, *middle]]
    assert reasons == [None] * len(middle) + ["length"]
    assert last.choices == []
    assert last.usage.completion_tokens == 20


def test_several_outputs_interleave(client: openai.OpenAI, tiny_oracle: LLM):
    expected = expected_text(tiny_oracle, n=3, seed=3, temperature=1.0)
    assert len(set(expected)) == 3
    request = {"model": MODEL, "messages": MESSAGES, "n": 3, "seed": 3, "max_tokens": 20}
    whole = client.chat.completions.create(**request)
    assert [choice.message.content for choice in whole.choices] == expected
    texts, order = ["", "", ""], []
    for chunk in client.chat.completions.create(**request, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        order.append(choice.index)
    assert texts == expected
    assert order != sorted(order), "no output waits for the others' end"


def test_the_clients_stream_helper(client: openai.OpenAI, tiny_oracle: LLM):
    text = expected_text(tiny_oracle)[0]
    with client.chat.completions.stream(messages=MESSAGES, **GREEDY, stop=text[5:8]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(text[5:8])]


def test_without_a_limit_the_answer_fills_the_context(client: openai.OpenAI, tiny_server: Running):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1)
    assert answer.usage.total_tokens == tiny_server.service.max_model_len
    assert answer.choices[0].finish_reason == "length"


def test_roles_and_parts(templated: Running):
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e", "name": "Eve"},
    ]
    expected = "system:a;user:b\nc;assistant:d;user(Eve):e;assistant:"
    assert prompt_of(templated, messages=messages) == expected


def test_tools_and_what_they_gave(templated: Running):
    called = {"name": "weather", "arguments": '{"city": "Bern"}'}
    call = {"id": "call_1", "type": "function", "function": called}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    prompt = prompt_of(templated, messages=messages, tools=[TOOL], tool_choice="auto")
    listed, _, rest = prompt.partition(";")
    assert json.loads(listed.removeprefix("tools=")) == [TOOL]
    assert rest == 'user:?;assistant:!weather{"city": "Bern"};tool:rain;assistant:'
    assert prompt_of(templated, messages=messages, tools=[TOOL]) == prompt
    assert prompt_of(templated, messages=messages, tools=[TOOL], tool_choice="none") == rest


def test_an_answer_can_be_sent_back(templated: Running):
    """Both the client's object and its dictionary with all nulls are accepted."""
    params = {"model": MODEL, "max_tokens": 4, "temperature": 0.0}
    with openai_client(templated) as client:
        message = client.chat.completions.create(messages=MESSAGES, **params).choices[0].message
    again = [{"role": "user", "content": "on"}]
    for given in (message, message.model_dump()):
        prompt = prompt_of(templated, messages=[*MESSAGES, given, *again])
        assert prompt == f"system:stop;user:the end;assistant:{message.content};user:on;assistant:"
