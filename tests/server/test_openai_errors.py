"""Errors that OpenAI's client raises: of the class that users catch, each names the field at fault."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from running import MODEL, Running, openai_client, running_server
from steering import LIMIT_S

from kvreclaim import LLM
from kvreclaim.errors import KVReclaimError
from kvreclaim.server.base.errors import ApiError

COMPLETION = {"model": MODEL, "prompt": "the end", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "the end"}], "max_tokens": 2}
IMAGE = [{"type": "image_url", "image_url": {"url": "http://localhost/"}}]
CONTINUE = {"continue_final_message": True, "add_generation_prompt": True}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def limited(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    llm = LLM(tiny_dir("llama"), num_blocks=64, max_num_seqs=8)
    with running_server(
        llm, api_keys=("k1", "k2"), max_n=3, max_queue_len=2, max_concurrent_outputs_per_key=9
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(limited: Running) -> Iterator[openai.OpenAI]:
    with openai_client(limited, api_key="k1") as client:
        yield client


COMPLETION_REFUSALS = [
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"extra_body": {"zoo": 1}}, "zoo"),
    ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
    ({"extra_body": {"spaces_between_special_tokens": True}}, "spaces_between_special_tokens"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": "2"}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 4}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"zoo": 1}}, "stream_options.zoo"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 1, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ({"user": "a", "extra_body": {"safety_identifier": "b"}}, "user"),
    ({"extra_body": {"min_tokens": 3}}, "min_tokens"),
    ({"extra_body": {"cache_salt": ""}}, "cache_salt"),
    ({"extra_body": {"body": 1}}, "body"),
    ({"extra_body": {"path": {}}}, "path"),
    ({"extra_body": {"priority": 1}}, "priority"),
    ({"extra_body": {"stop_token_ids": [10**9]}}, "stop_token_ids"),
    ({"extra_body": {"allowed_token_ids": [10**9]}}, "allowed_token_ids"),
    ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
    ({"extra_body": {"bad_words": ["a", ""]}}, "bad_words.1"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"prompt": ""}, "prompt"),
    ({"extra_body": {"prompt_cache_retention": "1h"}}, "prompt_cache_retention"),
    ({"extra_body": {"nvext": {"agent_hints": {"priority": 1}}}}, "nvext"),
    ({"extra_body": {"agent_hint": {"session_id": "a"}}}, "agent_hint.session_id"),
    ({"extra_body": {"agent_hint": {"cache_control": {"ttl": 0}}}}, "agent_hint.cache_control.ttl"),
    ({"extra_body": {"agent_hint": {"cache_control": {"ttl": 3601}}}}, "agent_hint.cache_control.ttl"),
    ({"extra_body": {"kv_compression": {"policy": "zoo"}}}, "kv_compression"),
    ({"extra_body": {"kv_compression": {"stats": "/etc/passwd"}}}, "kv_compression.stats"),
    ({"extra_body": {"kv_compression": {"budget": 0}}}, "kv_compression"),
    ({"extra_body": {"kv_compression": "zoo"}}, "kv_compression"),
    ({"extra_body": {"kv_compression": ""}}, "kv_compression.policy"),
    ({"extra_body": {"kv_compression": {"options": {"keep": {}}}}}, "kv_compression.options.keep"),
]

CHAT_REFUSALS = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "function", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": IMAGE}]}, "messages.0.content"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a", "zoo": 1}]}, "messages.0.zoo"),
    ({"messages": [{"role": "user", "content": "a", "name": "Eve"}]}, "messages.0.name"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]}, "messages.0.tool_call_id"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": TOOLS, "tool_choice": "must"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"metadata": {str(n): "b" for n in range(17)}}, "metadata"),
    ({"service_tier": "free"}, "service_tier"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities.0"),
    ({"verbosity": "low"}, "verbosity"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"extra_body": {"chat_template": "x"}}, "chat_template"),
]


REFUSALS = [
    *((COMPLETION, more, field) for more, field in COMPLETION_REFUSALS),
    *((CHAT, more, field) for more, field in CHAT_REFUSALS),
]


def refusal(client: openai.OpenAI, body: dict, more: dict) -> openai.BadRequestError:
    create = client.chat.completions.create if body is CHAT else client.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        create(**{**body, **more})
    return refused.value


@pytest.mark.parametrize(("body", "more", "field"), REFUSALS, ids=str)
def test_a_request_is_refused_by_the_name_of_its_field(
    client: openai.OpenAI, body: dict, more: dict, field: str
):
    error = refusal(client, body, more)
    assert error.param == field
    assert field.rpartition(".")[2] in error.body["message"]
    assert error.body["message"].endswith(".")
    assert error.body["type"] == "invalid_request_error"
    assert error.request_id.startswith("req-")


@pytest.mark.parametrize(
    ("body", "more", "field"),
    [
        *REFUSALS,
        (COMPLETION, {"prompt": "a" * 600}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        (CHAT, {"extra_body": {"chat_template_kwargs": {"zoo": 1}}}, "chat_template_kwargs"),
        (CHAT, {"extra_body": CONTINUE}, "continue_final_message"),
    ],
    ids=str,
)
def test_the_name_does_not_hang_on_the_wording(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, body: dict, more: dict, field: str
):
    """The field does not depend on the message: programs read the field."""
    monkeypatch.setattr(KVReclaimError, "__str__", lambda _: "it cannot be done.")
    assert refusal(client, body, more).param == field


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(client: openai.OpenAI, stream: bool):
    with pytest.raises(openai.BadRequestError, match=r"maximum context length.*max_model_len") as refused:
        client.completions.create(**COMPLETION | {"prompt": "a" * 600}, stream=stream)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="max_model_len") as refused:
        client.chat.completions.create(**CHAT | {"messages": [{"role": "user", "content": "a" * 600}]})
    assert refused.value.param == "messages"


@pytest.mark.parametrize("part", ["content", "parts", "reasoning_content", "reasoning", "arguments", "tools"])
def test_a_chat_that_is_far_too_long(client: openai.OpenAI, limited: Running, part: str):
    """Text in any part of a chat is counted before the template renders it."""
    text = "a" * (limited.service.max_chars + 1)
    call = {"id": "x", "function": {"name": "f", "arguments": json.dumps({text: 1})}}
    turn = {
        "content": {"content": text},
        "parts": {"content": [{"type": "text", "text": text}]},
        "arguments": {"tool_calls": [call]},
        "tools": {"content": ""},
    }.get(part, {"content": "", part: text})
    body: dict = {"messages": [{"role": "assistant", **turn}, {"role": "user", "content": "the end"}]}
    if part == "tools":
        body["tools"] = [{**TOOLS[0], "function": {"name": "f", "parameters": {"a": [{"enum": [text]}]}}}]
    with pytest.raises(openai.BadRequestError, match="characters, but max_model_len") as refused:
        client.chat.completions.create(**CHAT | body)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == ("tools" if part == "tools" else "messages")


@pytest.mark.parametrize("tokens", [[10**9], [-1]])
def test_tokens_that_the_model_has_not(client: openai.OpenAI, tokens: list[int]):
    with pytest.raises(openai.BadRequestError, match="token id"):
        client.completions.create(**COMPLETION | {"prompt": tokens})


def test_an_unknown_model(client: openai.OpenAI):
    for request in (
        lambda: client.completions.create(**COMPLETION | {"model": "zoo"}),
        lambda: client.chat.completions.create(**CHAT | {"model": "zoo"}),
        lambda: client.models.retrieve("zoo"),
    ):
        with pytest.raises(openai.NotFoundError, match="'zoo' is not served") as refused:
            request()
        assert refused.value.code == "model_not_found"


def test_a_wrong_key(limited: Running):
    refused = pytest.raises(openai.AuthenticationError, match="API key")
    with openai_client(limited, api_key="wrong") as client, refused:
        client.completions.create(**COMPLETION)


def test_more_prompts_than_could_ever_wait(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="split it"):
        client.completions.create(**COMPLETION | {"prompt": ["a", "b", "c"]})


def test_a_failure_after_the_answer_has_begun(
    client: openai.OpenAI, limited: Running, monkeypatch: pytest.MonkeyPatch
):
    """The status has been sent: the stream ends with an error that the client raises."""
    runner = limited.llm.engine.runner
    forward, calls, begun = runner.forward, [], threading.Event()

    def fail_late(step):
        calls.append(step)
        if len(calls) > 1:
            begun.wait(LIMIT_S)
            raise RuntimeError("out of luck")
        return forward(step)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", fail_late)
        stream = client.completions.create(**COMPLETION | {"max_tokens": 20, "logprobs": 0}, stream=True)
        assert next(stream).choices
        begun.set()
        with pytest.raises(openai.APIError, match="the log says why under req-"):
            list(stream)
    assert client.completions.create(**COMPLETION).choices


def test_a_refusal_quotes_no_more_than_anybody_reads(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**COMPLETION, extra_body={"z" * 100_000: 1})
    assert len(refused.value.body["message"]) < 1100
    assert len(refused.value.param) < 1100


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("top_k", 2**31 - 1),
        ("seed", 2**64 - 1),
        ("max_tokens", 2**31 - 1),
        ("min_tokens", 2**31 - 1),
        ("priority", 2**31 - 1),
    ],
)
def test_whole_numbers_have_bounds(client: openai.OpenAI, field: str, most: int):
    """Nothing behind them overflows; the bound itself is taken where the other fields allow it."""
    for value in (most + 1, 10**300, -(10**300)):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**COMPLETION | {"extra_body": {field: value}})
        assert refused.value.param == field
    if field not in ("priority", "min_tokens"):  # no priorities here; more than max_tokens
        fields = {"max_tokens": 1, field: most, "stop": "e"}
        assert client.completions.create(**{**COMPLETION, "extra_body": fields}).choices


@pytest.mark.parametrize("field", ["budget", "interval", "sinks", "recent"])
def test_compression_in_whole_numbers_has_bounds(client: openai.OpenAI, field: str):
    knorm = {"policy": "knorm"}
    for value in (2**31, 10**300):
        with pytest.raises(openai.BadRequestError, match=field):
            client.completions.create(**COMPLETION, extra_body={"kv_compression": knorm | {field: value}})


def test_another_name_of_a_field_leaves_words_alone():
    for message, reworded in (
        ("messages is empty.", "input is empty."),
        ("5 messages came.", "5 messages came."),
    ):
        error = ApiError(400, message, "messages").about("input")
        assert (error.message, error.param) == (reworded, "input")
