"""/v1/completions through OpenAI's own client: the same answers as the engine gives without a server."""

from __future__ import annotations

import json

import openai
import pytest
import web
from running import MODEL, Running, openai_client
from steering import pieces, read_at_once

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model

PROMPT = "the end of the story"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
GREEDY_FIELDS = {"model": MODEL, "temperature": 0.0, "max_tokens": 24}


def gather(chunks) -> dict[int, str]:
    """The text of each output of a stream, and that every output ended once, in its last chunk."""
    texts: dict[int, str] = {}
    ended: set[int] = set()
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in ended
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason is not None:
                ended.add(choice.index)
    assert ended == set(texts)
    return texts


def test_the_answer_is_the_engines(client: openai.OpenAI, tiny_oracle: LLM):
    expected = tiny_oracle.generate(PROMPT, GREEDY)[0]
    answer = client.completions.create(prompt=PROMPT, **GREEDY_FIELDS)
    choice = answer.choices[0]
    assert choice.text == expected.outputs[0].text
    assert choice.finish_reason == "length"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI, tiny_server: Running, tiny_oracle: LLM):
    expected = tiny_oracle.generate(PROMPT, GREEDY)[0].outputs[0].text
    options = {"include_usage": True}
    with read_at_once(tiny_server):
        chunks = list(
            client.completions.create(prompt=PROMPT, **GREEDY_FIELDS, stream=True, stream_options=options)
        )
    assert gather(chunks) == {0: expected}
    found = [choice.text for chunk in chunks for choice in chunk.choices if choice.text]
    assert found == pieces(tiny_oracle, PROMPT, GREEDY)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_what_a_stream_looks_like_on_the_wire(tiny_server: Running):
    body = {**GREEDY_FIELDS, "prompt": PROMPT, "stream": True}
    answer = web.post(f"{tiny_server.base_url}/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all("usage" not in chunk for chunk in chunks), "usage comes only with stream_options"
    assert [chunk["object"] for chunk in chunks] == ["text_completion"] * len(chunks)
    assert chunks[0]["id"].removeprefix("cmpl-") == answer.headers["x-request-id"].removeprefix("req-")


def test_an_echo_alone_is_no_answer_in_any_usage(client: openai.OpenAI):
    options = {"include_usage": True, "continuous_usage_stats": True}
    ask = {"prompt": PROMPT, **GREEDY_FIELDS, "max_tokens": 0, "echo": True}
    chunks = list(client.completions.create(**ask, stream=True, stream_options=options))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == PROMPT
    assert [chunk.usage.completion_tokens for chunk in chunks] == [0] * len(chunks)
    whole = client.completions.create(**ask)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (PROMPT, "length")
    assert whole.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_outputs(client: openai.OpenAI, tiny_oracle: LLM, stream: bool):
    prompts = [PROMPT, "then the end", "stop"]
    params = SamplingParams(n=2, seed=7, max_tokens=9)
    expected = [out.text for answer in tiny_oracle.generate(prompts, params) for out in answer.outputs]
    assert len(set(expected)) == 6
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, seed=7, max_tokens=9, stream=stream)
    if stream:
        texts = gather(answer)
    else:
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert answer.usage.completion_tokens == 54
        texts = {choice.index: choice.text for choice in answer.choices}
    assert [texts[index] for index in range(6)] == expected


def test_prompts_as_token_ids(client: openai.OpenAI, tiny_oracle: LLM):
    ids = [tiny_oracle.tokenizer.encode(text) for text in (PROMPT, "then")]
    expected = [out.outputs[0].text for out in tiny_oracle.generate(ids, GREEDY)]
    one = client.completions.create(prompt=ids[0], **GREEDY_FIELDS)
    two = client.completions.create(prompt=ids, **GREEDY_FIELDS)
    assert [choice.text for choice in one.choices] == expected[:1]
    assert [choice.text for choice in two.choices] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_never_seen(client: openai.OpenAI, tiny_oracle: LLM, stream: bool):
    text = tiny_oracle.generate(PROMPT, GREEDY)[0].outputs[0].text
    stop = text[7:10]
    answer = client.completions.create(
        prompt=PROMPT, **GREEDY_FIELDS, stop=[stop, "never said"], stream=stream
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].stop_reason == stop


def test_what_was_served_from_the_cache_is_counted(client: openai.OpenAI, tiny_server: Running):
    prompt = list(range(100, 167))
    size = tiny_server.llm.engine.config.block_size
    answers = [client.completions.create(model=MODEL, prompt=prompt, max_tokens=1) for _ in range(2)]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached == [0, 66 // size * size], "all whole blocks but those of the last token"


def test_what_compression_gave_back_is_counted(server: Running):
    settings = {"policy": "knorm", "budget": 64, "interval": 16, "recent": 16}
    prompt = [5 + i % 200 for i in range(300)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    oracle = LLM(demo_model(), num_blocks=256)
    expected = oracle.generate([prompt], params, CompressionConfig(**settings))[0].metrics
    request = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "temperature": 0.0}
    with openai_client(server) as client:
        answer = client.completions.create(
            **request, extra_body={"kv_compression": settings, "ignore_eos": True}
        )
    assert answer.usage.kv_cache == {
        "policy": "knorm",
        "budget": expected.budget,
        "sinks": 4,
        "tokens_evicted": expected.tokens_evicted,
        "blocks_freed": expected.blocks_freed,
        "peak_blocks": expected.peak_blocks,
        "final_blocks": expected.final_blocks,
        "reclaim_efficiency": expected.reclaim_efficiency,
        "reused_tokens": 0,
        "snapshot_tokens": 0,
        "dropped_tokens": 0,
    }
    assert answer.usage.kv_cache["blocks_freed"] > 10
