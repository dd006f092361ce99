"""/v1/responses: whole, as events, and as a conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import web
from responding import ask, events, outputs, post, refused
from running import MODEL, Running, running_server
from speaking import CALL, MISTRAL_CALL, biased
from steering import LIMIT_S, PendingRequest, assert_empty, halted

from kvreclaim import LLM
from kvreclaim.engine.serving.core import Update
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.openai.prompts import SharedFields
from kvreclaim.server.responses.fields import ResponsesRequest
from kvreclaim.server.responses.translate import translated

TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %} {{ m.role }}:"
    "{{ ' <think> ' + m.reasoning_content + ' </think>' if m.reasoning_content }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %} {{ mood }}{# <tool_call> #}"
)
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
THOUGHT = ("<think>", "Let", "me", "</think>", "look.")
REQUEST = {"input": "w20 w21", "tools": TOOLS}


@pytest.fixture(scope="module")
def server(speaker_dir: Path) -> Iterator[Running]:
    with running_server(LLM(speaker_dir, num_blocks=64)) as server:
        yield server


@pytest.fixture
def prompts(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the prompts that the model reads, one per request."""
    decoded: list[str] = []
    submit = server.service.submit

    def spy(request_id: str, specs: list[Any]) -> Any:
        decode = server.service.tokenizer.decode
        decoded.extend(str(decode(spec.prompt_token_ids, skip_special_tokens=False)) for spec in specs)
        return submit(request_id, specs)

    monkeypatch.setattr(server.service, "submit", spy)
    return decoded


def test_text_reasoning_and_a_call(server: Running) -> None:
    response = ask(server, **REQUEST, **biased(*THOUGHT, *CALL[:4]))
    assert outputs(response) == [
        ("reasoning", "Let me"),
        ("message", "look."),
        ("function_call", '{"city":"Bern"}'),
    ]
    assert [item["status"] for item in response["output"]] == ["completed"] * 3
    assert response["output"][2]["call_id"].startswith("call_")
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_the_texts_alone(server: Running, stream: bool) -> None:
    """Tokens of reasoning, calls and markers have none here, however the answer is cut."""
    fields = {
        **REQUEST,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        **biased(*THOUGHT, *CALL[:4]),
    }
    received = events(server, **fields) if stream else []
    response = received[-1]["response"] if stream else ask(server, **fields)
    [message] = [item for item in response["output"] if item["type"] == "message"]
    logprobs = message["content"][0]["logprobs"]
    assert [entry["token"].strip() for entry in logprobs] == ["look."]
    assert len(logprobs[0]["top_logprobs"]) == 2
    streamed = [
        entry
        for event in received
        if event["type"].endswith("text.delta")
        for entry in event.get("logprobs", [])
    ]
    assert streamed == (logprobs if stream else [])


def test_a_broken_call_in_a_whole_answer_is_text_with_log_probabilities(server: Running) -> None:
    include = ["message.output_text.logprobs"]
    words = ("look.", *CALL[:3], "me")
    fields = {**REQUEST, "include": include, **biased(*words)}
    [message] = ask(server, **fields)["output"]
    content = message["content"][0]
    assert content["text"].split() == [*words]
    assert [entry["token"].strip() for entry in content["logprobs"]] == [*words]
    streamed = events(server, **fields)[-1]["response"]["output"]
    texts = [item["content"][0] for item in streamed if item["type"] == "message"]
    assert [[entry["token"].strip() for entry in part["logprobs"]] for part in texts] == [["look."], ["me"]]


def test_the_same_as_events(server: Running) -> None:
    """In their order; the deltas of each item make what it holds in the end."""
    fields = {**REQUEST, **biased(*THOUGHT, *CALL[:4])}
    received = events(server, **fields)
    kinds = [event["type"].removeprefix("response.") for event in received]
    text = ["content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    expected = ["created", "in_progress"]
    for kind in ("reasoning_text", "output_text"):
        expected += ["output_item.added", *(name.format(kind) for name in text)]
    call = "function_call_arguments"
    expected += ["output_item.added", f"{call}.delta", f"{call}.done", "output_item.done", "completed"]
    assert list(dict.fromkeys(zip(kinds, [e.get("output_index") for e in received], strict=True))) == list(
        dict.fromkeys(zip(expected, [None] * 2 + [0] * 6 + [1] * 6 + [2] * 4 + [None], strict=True))
    )
    response = received[-1]["response"]
    for index, item in enumerate(response["output"]):
        own = [event for event in received if event.get("output_index") == index]
        written = "".join(event.get("delta", "") for event in own)
        assert (item["type"], written) == outputs(response)[index]
        assert own[-1]["item"] == item
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
    assert outputs(response) == outputs(ask(server, **fields))


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_was_cut_off(server: Running, stream: bool) -> None:
    fields = {**REQUEST, "max_output_tokens": 2, **biased("Let", "me", "look.")}
    response = events(server, **fields)[-1]["response"] if stream else ask(server, **fields)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None


def test_an_answer_without_words_is_an_empty_message(server: Running) -> None:
    assert outputs(ask(server, **REQUEST, **biased())) == [("message", "")]
    assert [event["type"] for event in events(server, **REQUEST, **biased())][-2:] == [
        "response.output_item.done",
        "response.completed",
    ]


def test_a_call_cut_off_in_a_stream_is_not_read_again(server: Running, prompts: list[str]) -> None:
    """Its arguments have been streamed already; in a whole answer it is text, as in chat."""
    fields = {**REQUEST, "max_output_tokens": 2, **biased(*CALL)}
    last = events(server, **fields)[-1]["response"]
    assert last["status"] == "incomplete"
    ask(server, input="w22", previous_response_id=last["id"], **biased("me"))
    assert outputs(ask(server, **fields)) == [("message", " ".join(CALL[:2]))]
    assert " w22" in prompts[1]


def test_a_call_cut_off_within_its_arguments_is_incomplete(speaker_dir: Path) -> None:
    fields = {**REQUEST, "max_output_tokens": 3, **biased("look.", *MISTRAL_CALL)}
    fields["include"] = ["message.output_text.logprobs"]
    with running_server(LLM(speaker_dir, num_blocks=64), tool_call_parser="mistral") as server:
        for response in (ask(server, **fields), events(server, **fields)[-1]["response"]):
            assert (response["status"], len(response["output"])) == ("incomplete", 2)
            message, call = response["output"]
            assert [entry["token"].strip() for entry in message["content"][0]["logprobs"]] == ["look."]
            assert (call["type"], call["status"]) == ("function_call", "incomplete")
            assert (call["name"], call["arguments"]) == ("weather", '{"city":')


def test_the_output_of_an_incomplete_call_is_left_out_with_it(server: Running, prompts: list[str]) -> None:
    user, again = {"role": "user", "content": "w20"}, {"role": "user", "content": "w22"}
    call = {**CALLED, "arguments": '{"ci', "status": "incomplete"}
    ask(server, input=[user, call, OUTPUT, again], **biased("me"))
    ask(server, input=[user, again], **biased("me"))
    assert prompts[0] == prompts[1]
    last = ask(server, input=[user, call, CALLED, OUTPUT, again], **biased("me"))
    assert OUTPUT["output"] in prompts[2]
    ask(server, input="w23", previous_response_id=last["id"], **biased("me"))
    assert prompts[3].startswith(prompts[2])


def test_a_call_may_be_without_arguments_or_broken(server: Running, prompts: list[str]) -> None:
    for arguments in ("{}", "", '{"city'):
        ask(server, input=[{**CALLED, "arguments": arguments}, OUTPUT], **biased("me"))
    assert prompts[0] == prompts[1]
    assert prompts[2] != prompts[0]


def test_three_turns_are_one_conversation(server: Running, prompts: list[str]) -> None:
    """previous_response_id gives the model the same prompt as the whole conversation, instructions apart."""
    call = biased(*THOUGHT, *CALL[:4])
    first = ask(server, **REQUEST, instructions="w40", **call)
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "w30"}
    second = ask(
        server,
        input=[result],
        tools=TOOLS,
        previous_response_id=first["id"],
        instructions="w41",
        **biased("me"),
    )
    ask(server, input="w23", tools=TOOLS, previous_response_id=second["id"], **biased("look."))
    user = {"role": "user", "content": "w20 w21"}
    whole = [user, *first["output"], result, *second["output"], {"role": "user", "content": "w23"}]
    ask(server, input=whole, tools=TOOLS, **biased("look."))
    assert prompts[2] == prompts[3]
    assert "w40" not in prompts[1]
    assert "w41" not in prompts[2]
    chat = [
        user,
        {
            "role": "assistant",
            "content": "look.",
            "reasoning_content": "Let me",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Bern"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "w30"},
        {"role": "assistant", "content": outputs(second)[0][1]},
        {"role": "user", "content": "w23"},
    ]
    function = {name: value for name, value in TOOLS[0].items() if name != "type"}
    tools = [{"type": "function", "function": function}]
    body = {"model": MODEL, "messages": chat, "tools": tools, **biased("look.")}
    assert web.post(f"{server.base_url}/v1/chat/completions", json=body).status_code == 200
    assert prompts[4] == prompts[2]


def test_items_that_are_named_are_those_that_were_kept(server: Running, prompts: list[str]) -> None:
    """previous_response_id gives the same items; those that are named are stored again."""
    first = ask(server, **REQUEST, **biased(*THOUGHT, *CALL[:4]))
    user = {"role": "user", "content": "w20 w21"}
    names = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "w30"}
    ask(server, input=[result], previous_response_id=first["id"], **biased("me"))
    named = ask(server, input=[user, *names, result], **biased("me"))
    assert prompts[1] == prompts[2]
    address = f"{server.base_url}/v1/responses/{named['id']}/input_items"
    assert web.get(address, params={"order": "asc"}).json()["data"][1:4] == first["output"]


def test_an_item_is_sent_once(server: Running) -> None:
    """Pages of items follow their ids."""
    first = ask(server, input="w20", **biased("me"))
    [item] = first["output"]
    name = {"type": "item_reference", "id": item["id"]}
    assert refused(server, input=[name, name])[0] == "input.1.id"
    for again in (item, name):
        assert refused(server, input=[again], previous_response_id=first["id"])[0] == "input.0.id"


def test_items_of_a_conversation_are_kept_in_order(server: Running) -> None:
    first = ask(
        server,
        input=[{"role": "system", "content": "w40"}, {"role": "user", "content": "w20"}],
        **biased("me"),
    )
    second = ask(server, input="w21", previous_response_id=first["id"], **biased("look."))
    address = f"{server.base_url}/v1/responses/{second['id']}"
    assert web.get(address).json() == second
    page = web.get(f"{address}/input_items", params={"order": "asc"}).json()
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["w40", "w20", outputs(first)[0][1], "w21"]
    assert page["data"][2] == first["output"][0]
    ids = [item["id"] for item in page["data"]]
    turned = web.get(f"{address}/input_items", params={"limit": 2, "after": ids[3]}).json()
    assert [item["id"] for item in turned["data"]] == [ids[2], ids[1]]
    assert (turned["has_more"], turned["first_id"], turned["last_id"]) == (True, ids[2], ids[1])
    assert web.get(f"{address}/input_items", params={"after": "none"}).status_code == 400
    assert web.get(address, params={"stream": True}).status_code == 400
    assert web.post(f"{address}/cancel").status_code == 400


def test_what_is_deleted_is_gone_and_what_continues_it_remains(server: Running) -> None:
    first = ask(server, input="w20", **biased("me"))
    second = ask(server, input="w21", previous_response_id=first["id"], **biased("look."))
    address = f"{server.base_url}/v1/responses/"
    with web.Client() as client:
        done = client.delete(address + first["id"])
        assert done.json() == {"id": first["id"], "object": "response", "deleted": True}
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            assert client.request(method, address + first["id"] + path).status_code == 404
    param, _ = refused(server, input="w22", previous_response_id=first["id"])
    assert param == "previous_response_id"
    ask(server, input="w22", previous_response_id=second["id"], **biased("me"))


def test_store_false_keeps_nothing(server: Running) -> None:
    response = ask(server, input="w20", store=False, **biased("me"))
    assert response["store"] is False
    assert web.get(f"{server.base_url}/v1/responses/{response['id']}").status_code == 404


def test_settings_are_echoed(server: Running) -> None:
    given = {
        "instructions": "w40",
        "metadata": {"a": "b"},
        "max_output_tokens": 5,
        "user": "somebody",
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "temperature": 0.5,
        "top_p": 0.9,
        "prompt_cache_key": "chapter",
        "prompt_cache_retention": "24h",
        "max_tool_calls": 3,
    }
    response = ask(server, **REQUEST, **given)
    assert {name: response[name] for name in given} == given
    assert response["tools"][0]["name"] == "weather"
    assert response["created_at"] <= response["completed_at"] if response["completed_at"] else True


def test_without_tools_calls_are_text(server: Running, prompts: list[str]) -> None:
    fields = {**REQUEST, "tool_choice": "none", "chat_template_kwargs": {"mood": "w50"}}
    assert outputs(ask(server, **fields, **biased(*CALL[:4]))) == [("message", " ".join(CALL[:4]))]
    assert "weather" not in prompts[0]
    assert prompts[0].endswith("w50")


CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "w30"}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


@pytest.mark.parametrize(
    ("items", "prompt"),
    [
        (
            [{"role": "user", "content": [{"type": "input_text", "text": t} for t in ("w20", "w21")]}],
            "user: w20 w21",
        ),
        ([{"role": "developer", "content": "w20"}], "system: w20"),
        (
            [{"role": "user", "content": "w20"}, {"role": "assistant", "content": "me"}] * 2,
            "user: w20 assistant: me user: w20 assistant: me",
        ),
        ([{"role": "assistant", "content": "me"}] * 2, "assistant: me assistant: me"),
        (
            [
                thought("w1"),
                CALLED,
                {**CALLED, "call_id": "d"},
                {"role": "assistant", "content": "me"},
                {**OUTPUT, "output": [{"type": "input_text", "text": "w30"}]},
                {**OUTPUT, "call_id": "d"},
            ],
            "assistant: <think> w1 </think> me f{} f{} tool: w30 tool: w30",
        ),
        ([CALLED, OUTPUT, CALLED, OUTPUT], "assistant: f{} tool: w30 assistant: f{} tool: w30"),
        (
            [{"role": "assistant", "content": "me"}, CALLED, {"role": "assistant", "content": "me"}, OUTPUT],
            "assistant: me me f{} tool: w30",
        ),
        (
            [
                *({"role": "assistant", "content": "me"}, CALLED, {"role": "assistant", "content": "w1"}),
                *({"role": "assistant", "content": "w2"}, {"role": "user", "content": "w20"}),
            ],
            "assistant: me f{} assistant: w1 assistant: w2 user: w20",
        ),
        (
            [CALLED, {"role": "user", "content": "w20"}, OUTPUT],
            "assistant: f{} user: w20 tool: w30",
        ),
        (
            [
                *(CALLED, *({"role": "assistant", "content": each} for each in ("w1", "w2"))),
                *({**CALLED, "call_id": "d"}, OUTPUT, {**OUTPUT, "call_id": "d"}),
            ],
            "assistant: w1 w2 f{} f{} tool: w30 tool: w30",
        ),
        (
            [thought("w1"), thought("w2"), {"role": "assistant", "content": "me"}],
            "assistant: <think> w1 w2 </think> me",
        ),
        (
            [
                {"role": "developer", "content": "w20"},
                {"role": "system", "content": "w21"},
                {"role": "user", "content": "w22"},
                {"role": "system", "content": "w23"},
            ],
            "system: w20 w21 user: w22 system: w23",
        ),
    ],
    ids=[
        *("parts", "developer", "turns", "neighbours", "one turn", "calls", "a text before a result"),
        *("a text behind a call", "a user's text behind a call", "texts between calls"),
        *("thoughts", "leading"),
    ],
)
def test_items_as_messages(server: Running, prompts: list[str], items: list[Any], prompt: str) -> None:
    expected = server.service.tokenizer.encode(prompt, add_special_tokens=False)
    response = ask(server, input=items, **biased("me"))
    assert prompts[0].split() == str(server.service.tokenizer.decode(expected)).split()
    assert response["usage"]["input_tokens"] == len(expected)


def test_instructions_and_a_leading_system_message_are_one(server: Running, prompts: list[str]) -> None:
    items = [{"role": "system", "content": "w41"}, {"role": "user", "content": "w20"}]
    first = ask(server, input=items, instructions="w40", **biased("me"))
    ask(server, input="w21", previous_response_id=first["id"], instructions="w42", **biased("me"))
    for prompt, system in zip(prompts, ("w40 w41", "w42 w41"), strict=True):
        decoded = server.service.tokenizer.decode(
            server.service.tokenizer.encode(f"system: {system} user: w20", add_special_tokens=False)
        )
        assert prompt.split()[:5] == str(decoded).split()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id"),
        ({"input": [{"type": "item_reference", "id": f"msg_{'0' * 32}_0"}]}, "input.0.id"),
        ({"input": [{"role": "user", "content": "w20"}, {"role": "tool", "content": "a"}]}, "input.1.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": "w20"}, OUTPUT]}, "input.1.call_id"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input.0.encrypted_content",
        ),
        ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}]}, "input.0.summary"),
        ({"input": "w20 " * 5000}, "input"),
        ({"input": [thought("w20 " * 5000), {"role": "user", "content": "w20"}]}, "input"),
        ({"input": [{"id": "a", "role": "user", "content": "w20"}] * 2}, "input.1.id"),
        ({"input": "w20 " * 600}, "input"),
        ({"input": "w20", "conversation": "conv_1"}, "conversation"),
        ({"input": "w20", "prompt": {"id": "x"}}, "prompt"),
        ({"input": "w20", "background": True, "store": False}, "store"),
        ({"input": "w20", "tools": [{"type": "web_search"}]}, "tools.0"),
        ({**REQUEST, "tool_choice": "required"}, "tool_choice"),
        ({**REQUEST, "tools": [{**TOOLS[0], "strict": True}]}, "tools.0.strict"),
        ({"input": "w20", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"input": "w20", "tools": [{"type": "function", "name": ""}]}, "tools.0.name"),
        ({"input": "w20", "include": ["web_search_call.results"]}, "include"),
        ({"input": "w20", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "w20", "stream_options": {}}, "stream_options"),
        (
            {"input": "w20", "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"input": "w20", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "w20", "text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        (
            {
                "input": "w20",
                "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}},
            },
            "text.format.schema",
        ),
        (
            {
                "input": "w20",
                "text": {"format": {"type": "json_object"}},
                "structured_outputs": {"regex": "a"},
            },
            "text.format",
        ),
        ({"input": "w20", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"input": "w20", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": "w20", "reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": "w20", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "w20", "min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
        ({"input": "w20", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"input": "w20", "priority": -1}, "priority"),
        ({"input": "w20", "n": 2}, "n"),
        ({"input": "w20", "user": "a", "safety_identifier": "b"}, "user"),
        ({"input": "w20", "model": 1}, "model"),
    ],
)
def test_a_refusal_names_this_apis_field(server: Running, body: dict[str, Any], param: str) -> None:
    named, message = refused(server, **body)
    assert named == param
    assert not any(word in message for word in ("messages.", "response_format", "max_completion_tokens"))


def test_other_statuses(server: Running) -> None:
    assert refused(server, 404, model="zoo", input="w20")[0] == "model"
    long = {"input": [{"role": "user", "content": "a"}] * 600}
    assert refused(server, **long)[0] == "input"
    received = events(server, input="w20", **biased("me"))
    assert received[0]["response"]["status"] == "in_progress"


def test_a_failure_is_the_last_event(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvreclaim.server.responses.answer.ResponseAnswer._take", None)
    last = events(server, **REQUEST, **biased("me"))[-1]
    assert last["response"]["usage"] is None
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["store"] is False
    assert web.get(f"{server.base_url}/v1/responses/{last['response']['id']}").status_code == 404


def test_a_failure_ends_the_item_that_is_open(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = server.service.submit

    @asynccontextmanager
    async def broken(request_id: str, specs: list[Any]) -> AsyncIterator[list[Any]]:
        async with submit(request_id, specs) as (stream,):

            async def updates() -> AsyncIterator[Update]:
                async for update in stream:
                    yield replace(update, finished=False)
                raise ApiError(500, "it broke.")

            yield [updates()]

    monkeypatch.setattr(server.service, "submit", broken)
    received = events(server, **REQUEST, **biased("Let", "me"))
    assert [event["type"].removeprefix("response.") for event in received[-4:]] == [
        *("output_text.done", "content_part.done", "output_item.done", "failed"),
    ]
    response = received[-1]["response"]
    assert outputs(response) == [("message", "Let me")]
    assert response["output"] == [received[-2]["item"]]
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_shuts_down_fails_what_runs(server: Running, stream: bool) -> None:
    body = {"model": MODEL, **REQUEST, "ignore_eos": True, "stream": stream}
    with halted(server) as wait:
        pending = PendingRequest(server, "/v1/responses", body)
        wait()
        aborted = asyncio.run_coroutine_threadsafe(server.service.engine.abort_all(), server.loop)
        answer = pending.answer()
        aborted.result(LIMIT_S)
    last = json.loads(answer.text.rpartition("data: ")[2]) if stream else answer.json()
    response = last["response"] if stream else last
    assert (response["status"], response["store"]) == ("failed", False)
    assert "shut down" in response["error"]["message"]
    assert response["output"][0]["status"] == "incomplete"


def test_who_leaves_a_stream_takes_its_request_along(server: Running) -> None:
    body = {"model": MODEL, **REQUEST, "ignore_eos": True, "stream": True}
    with halted(server), web.stream("POST", f"{server.base_url}/v1/responses", json=body) as answer:
        first = json.loads(next(line for line in answer.iter_lines() if line.startswith("data: "))[6:])
        answer.close()
        assert_empty(server)
    assert web.get(f"{server.base_url}/v1/responses/{first['response']['id']}").status_code == 404


def test_null_is_as_good_as_absent(server: Running) -> None:
    nothing = dict.fromkeys(("conversation", "prompt", "background", "include", "text", "reasoning", "tools"))
    assert post(server, {"input": "w20", **nothing, **biased("me")}).status_code == 200


SHARED = {
    "model": MODEL,
    "stop": ["w60"],
    "stop_token_ids": [61],
    "allowed_token_ids": [1, 2, 3],
    "bad_words": ["w62"],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "prompt_cache_key": "chapter",
    "prompt_cache_retention": "24h",
    "agent_hint": {"cache_control": {"ttl": 60.0}},
    "user": "somebody",
    "safety_identifier": "somebody",
    "service_tier": "flex",
    "metadata": {"a": "b"},
    "store": False,
    "structured_outputs": {"regex": "a"},
    "documents": ["w20"],
    "chunk_reuse": {"share": 0.5},
    "stream": True,
    "logit_bias": {"4": 1.0},
    "cache_salt": "a",
    "priority": 3,
    "kv_compression": {"policy": "knorm", "budget": 32},
    "compress_prompt_at": 16,
    "conversation_snapshots": False,
    "sparse_prefill": "dense",
    "seed": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 2,
    "ignore_eos": True,
}
OWN = {
    *("input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "text"),
    *("reasoning", "max_output_tokens", "max_tool_calls", "top_logprobs", "include", "truncation"),
    *("background", "stream_options", "chat_template_kwargs", "thinking_token_budget"),
}
"""Tested above, and in test_responses_client.py."""


def test_fields_of_all_routes_reach_chat(server: Running) -> None:
    assert SHARED.keys() == SharedFields.model_fields.keys()
    assert SHARED.keys() | OWN == ResponsesRequest.model_fields.keys()
    body = ResponsesRequest.model_validate({**SHARED, "input": "w20"})
    chat = translated(body, server.service, None, None).chat
    for name in SHARED:
        assert getattr(chat, name) == getattr(body, name) is not None
