"""/v1/messages through Anthropic's own client: the same answers as the engine gives without a server."""

from __future__ import annotations

import asyncio
import json

import anthropic
import pytest
import web
from bare_messages import HELLO, RENDERED
from messaging import GREEDY, Connect, ask, expected
from running import MODEL, Running, running_server
from steering import LIMIT_S, halted, pieces, read_at_once

from kvreclaim import LLM, SamplingParams, demo_model


@pytest.fixture
def client(tiny_server: Running, connect: Connect) -> anthropic.Anthropic:
    return connect(tiny_server)


def test_the_answer_is_the_engines(client: anthropic.Anthropic, tiny_oracle: LLM):
    message = ask(client)
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == expected(tiny_oracle).text
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.id == message._request_id.replace("req-", "msg_")
    assert message.usage.output_tokens == 12


def test_a_stream_is_the_answer_in_pieces(
    client: anthropic.Anthropic, tiny_server: Running, tiny_oracle: LLM
):
    text = expected(tiny_oracle).text
    given = {"model": MODEL, "max_tokens": 12, "messages": HELLO, "extra_body": GREEDY}
    with read_at_once(tiny_server), client.messages.stream(**given) as stream:
        found = list(stream.text_stream)
        final = stream.get_final_message()
    assert found == pieces(tiny_oracle, RENDERED, SamplingParams(temperature=0.0, max_tokens=12))
    assert "".join(found) == final.content[0].text == text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    raw = list(client.messages.create(**given, stream=True))
    assert "".join(e.delta.text for e in raw if e.type == "content_block_delta") == text


def test_what_a_stream_looks_like_on_the_wire(tiny_server: Running):
    body = {"model": MODEL, "max_tokens": 5, "messages": HELLO, "stream": True, **GREEDY}
    response = web.post(f"{tiny_server.base_url}/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [event.split("\n") for event in response.text.removesuffix("\n\n").split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in lines]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert names == [event["type"] for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    begun, ended = events[0]["message"], events[-2]
    assert begun["id"].removeprefix("msg_") == response.headers["request-id"].removeprefix("req-")
    assert (begun["content"], begun["stop_reason"]) == ([], None)
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == 5
    same = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation")
    assert [ended["usage"][name] for name in same] == [begun["usage"][name] for name in same]


def test_the_async_client_streams_many_at_once(tiny_server: Running, tiny_oracle: LLM):
    prompts = [f"story number {i}" for i in range(8)]

    async def one(client: anthropic.AsyncAnthropic, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        given = {"model": MODEL, "max_tokens": 12, "messages": messages, "extra_body": GREEDY}
        async with client.messages.stream(**given) as stream:
            return await stream.get_final_text()

    async def all_of_them() -> list[str]:
        async with anthropic.AsyncAnthropic(
            base_url=tiny_server.base_url, api_key="any", max_retries=0
        ) as client:
            count = await client.messages.count_tokens(model=MODEL, messages=HELLO)
            assert count.input_tokens == len(tiny_oracle.tokenizer.encode(RENDERED))
            return await asyncio.gather(*(one(client, text) for text in prompts))

    wanted = [expected(tiny_oracle, f"user: {text}\nassistant: ").text for text in prompts]
    assert asyncio.run(all_of_them()) == wanted


# Why an answer ends


def test_a_stop_sequence_is_named_and_cut(client: anthropic.Anthropic, tiny_oracle: LLM):
    text = expected(tiny_oracle).text
    stop = text[4:6]
    message = ask(client, stop_sequences=["never there", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]
    stopped_at_once = ask(client, stop_sequences=[text[0]])
    assert stopped_at_once.content == [], "an answer without text has no block"
    with client.messages.stream(
        model=MODEL, max_tokens=12, messages=HELLO, stop_sequences=[stop], extra_body=GREEDY
    ) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def test_the_models_own_end(server: Running, connect: Connect):
    client = connect(server)
    text = "the sun the sun the sun"
    oracle = server.llm.tokenizer.encode(text)
    message = ask(client, messages=[{"role": "user", "content": text}], max_tokens=24)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len(oracle)
    longer = ask(
        client, messages=[{"role": "user", "content": text}], max_tokens=24, extra={"ignore_eos": True}
    )
    assert (longer.stop_reason, longer.usage.output_tokens) == ("max_tokens", 24)


def test_the_context_window_is_another_end_than_max_tokens(client: anthropic.Anthropic, tiny_server: Running):
    limit = tiny_server.service.max_model_len
    text = "x" * (limit - len("user: \nassistant: ") - 5)
    message = ask(client, messages=[{"role": "user", "content": text}], max_tokens=100)
    usage = message.usage
    assert message.stop_reason == "model_context_window_exceeded"
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == limit


def test_a_server_that_shuts_down_pauses_the_turn(tiny_oracle: LLM, connect: Connect):
    with running_server(tiny_oracle) as server:
        client = connect(server)
        given = {"model": MODEL, "max_tokens": 400, "messages": HELLO}
        with halted(server) as wait, client.messages.stream(**given) as stream:
            assert next(iter(stream)).type == "message_start"
            wait()
            engine = server.service.engine
            asyncio.run_coroutine_threadsafe(engine.abort_all(), server.loop).result(LIMIT_S)
            final = stream.get_final_message()
        assert final.stop_reason == "pause_turn"
        assert 0 < final.usage.output_tokens < 400
        server.loop.call_soon_threadsafe(server.service.draining.set)
        with pytest.raises(anthropic.InternalServerError, match="shutting down") as refused:
            client.messages.create(**given)
        assert refused.value.status_code == 503
        assert refused.value.body["error"]["type"] == "overloaded_error"


# Prefill


def test_an_answer_goes_on_from_a_prefill(client: anthropic.Anthropic, tiny_oracle: LLM):
    messages = [*HELLO, {"role": "assistant", "content": "It was the"}]
    message = ask(client, messages=messages)
    assert message.content[0].text == expected(tiny_oracle, RENDERED + "It was the").text
    counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    assert counted == len(tiny_oracle.tokenizer.encode(RENDERED + "It was the"))


def test_a_prefill_and_its_answer_join_as_one_text(server: Running, connect: Connect):
    """The demo model's tokens are words with spaces between them, which no token has of its own."""
    client = connect(server)
    prefill = "sky sun # ?"
    messages = [{"role": "user", "content": "wind wave"}, {"role": "assistant", "content": prefill}]
    alone = LLM(demo_model(), num_blocks=64)
    prompt = alone.tokenizer.encode(f"wind wave {prefill}")
    answered = alone.generate(prompt, SamplingParams(temperature=0.0, max_tokens=6))[0].outputs[0]
    whole = alone.tokenizer.decode(prompt + answered.token_ids)
    message = ask(client, messages=messages, max_tokens=6)
    assert f"wind wave {prefill}{message.content[0].text}" == whole
    given = {"model": MODEL, "max_tokens": 6, "messages": messages, "extra_body": GREEDY}
    with client.messages.stream(**given) as stream:
        assert stream.get_final_text() == message.content[0].text
