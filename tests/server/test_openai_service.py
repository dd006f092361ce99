"""/v1/models, /tokenize, /detokenize, the server's own compression, and answers against their description."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import httpx2
import pytest
import web
from running import MODEL, Running, openai_client, running_server
from steering import LIMIT_S, PendingRequest

from kvreclaim import LLM, CompressionConfig, demo_model
from kvreclaim.server.openai import schemas

NAMES = ("first", "org/second", "third")
MESSAGES = [{"role": "user", "content": "the end"}]


@pytest.fixture(scope="module")
def named(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    with running_server(LLM(tiny_dir("llama"), num_blocks=32), served_model_name=NAMES) as running:
        yield running


def post(server: Running, path: str, **body) -> httpx2.Response:
    return web.post(server.base_url + path, json=body)


def test_models_for_openai(named: Running):
    with openai_client(named) as client:
        models = list(client.models.list())
        assert [model.id for model in models] == list(NAMES)
        assert {model.object for model in models} == {"model"}
        assert models[0].max_model_len == named.service.max_model_len
        assert client.models.retrieve("org/second") == models[1]


def test_models_for_anthropic(named: Running):
    with anthropic.Anthropic(base_url=named.base_url, api_key="any") as client:
        assert [model.id for model in client.models.list(limit=2)] == list(NAMES), "page after page"
        assert client.models.list(before_id="third", limit=1).data[0].id == "org/second"
        page = client.models.list(limit=2)
        assert (page.first_id, page.last_id, page.has_more) == ("first", "org/second", True)
        model = client.models.retrieve("third")
        assert (model.type, model.display_name) == ("model", "third")
        assert model.created_at.year > 2024
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("zoo")


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "zoo=1"])
def test_a_list_with_a_wrong_query_is_refused(named: Running, query: str):
    answer = web.get(f"{named.base_url}/v1/models?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_text_to_tokens_and_back(tiny_server: Running, tiny_oracle: LLM):
    text = "the naïve end"
    ids = tiny_oracle.tokenizer.encode(text)
    answer = post(tiny_server, "/tokenize", prompt=text, model=MODEL).json()
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids)
    assert answer["max_model_len"] == tiny_server.service.max_model_len
    assert answer["token_strs"] is None
    strings = post(tiny_server, "/tokenize", prompt=text, return_token_strs=True).json()["token_strs"]
    assert strings == tiny_oracle.tokenizer.convert_ids_to_tokens(ids)
    assert post(tiny_server, "/detokenize", tokens=ids).json() == {"prompt": text, "content": text}
    assert post(tiny_server, "/detokenize", tokens=[]).json()["prompt"] == ""


def test_a_long_text_is_tokenized_aside(tiny_server: Running, tiny_oracle: LLM):
    text = "the end " * 2000
    tokens = post(tiny_server, "/tokenize", prompt=text).json()["tokens"]
    assert tokens == tiny_oracle.tokenizer.encode(text)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_a_conversation_is_rendered_aside(tiny_server: Running, monkeypatch: pytest.MonkeyPatch, path: str):
    """However long the template takes, and however short the conversation is: others are answered."""
    tokenizer = tiny_server.llm.tokenizer
    entered, go, apply = threading.Event(), threading.Event(), tokenizer.apply_chat_template

    def slowly(*args, **options) -> str:
        entered.set()
        assert go.wait(LIMIT_S)
        return apply(*args, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", slowly)
    limit = {} if path == "/tokenize" else {"max_tokens": 1}
    pending = PendingRequest(tiny_server, path, {"model": MODEL, "messages": MESSAGES, **limit})
    assert entered.wait(LIMIT_S)
    assert web.get(f"{tiny_server.base_url}/health").status_code == 200
    go.set()
    assert pending.answer().status_code == 200


def test_a_conversation_is_tokenized_as_it_would_be_answered(tiny_server: Running):
    with openai_client(tiny_server) as client:
        for more in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
            params = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
            extra = {"return_token_ids": True, **more}
            chat = client.chat.completions.create(**params, extra_body=extra)
            answer = post(tiny_server, "/tokenize", messages=MESSAGES, **more).json()
            assert answer["tokens"] == chat.prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "zoo"}, "model"),
        ("/tokenize", {"prompt": "a", "zoo": 1}, "zoo"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "zoo"}, "model"),
    ],
    ids=str,
)
def test_what_is_refused(tiny_server: Running, path: str, body: dict, field: str):
    answer = post(tiny_server, path, **body)
    assert answer.status_code == (404 if field == "model" else 400)
    assert answer.json()["error"]["param"] == field


def test_a_request_and_the_servers_own_compression():
    """Fields that a request leaves out are the server's; "full" opts out; another policy starts afresh."""
    own = CompressionConfig("knorm", budget=64, interval=16, recent=16)
    llm = LLM(demo_model(), num_blocks=256, compression=own)
    ask = {"model": MODEL, "prompt": [5 + i % 200 for i in range(400)]}
    ask |= {"max_tokens": 2, "ignore_eos": True}

    def evicted(server: Running, **fields) -> int:
        answer = post(server, "/v1/completions", **ask, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["kv_cache"]["tokens_evicted"]

    with running_server(llm) as server:
        assert evicted(server) == 400 - 64
        assert evicted(server, kv_compression={"budget": 128}) == 400 - 128
        assert evicted(server, kv_compression={"policy": "full"}) == 0
        streaming = {"policy": "streaming_llm", "budget": 200}
        assert evicted(server, kv_compression=streaming) == 400 - 200
        refused = post(server, "/v1/completions", **ask, kv_compression={"budget": 10})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "kv_compression"


FIELDS = [
    {},
    {"n": 2, "logprobs": True, "seed": 1},
    {"prompt_logprobs": 1, "return_token_ids": True, "temperature": 0},
    {"kv_compression": {"policy": "knorm", "budget": 16, "interval": 16, "sinks": 2, "recent": 4}},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_answers_are_as_described(tiny_server: Running, fields: dict):
    """The OpenAPI description's models take every answer, and know every field of it."""
    body = {"model": MODEL, "max_tokens": 8, **fields}
    chat = post(tiny_server, "/v1/chat/completions", messages=MESSAGES, **body)
    schemas.ChatCompletion.model_validate_json(chat.content)
    if body.pop("logprobs", None):
        body["logprobs"] = 3
    completion = post(tiny_server, "/v1/completions", prompt="the end", **body)
    schemas.Completion.model_validate_json(completion.content)
    if "prompt_logprobs" in fields:
        return
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for path, model, prompt in (
        ("/v1/completions", schemas.Completion, {"prompt": "the end"}),
        ("/v1/chat/completions", schemas.ChatCompletionChunk, {"messages": MESSAGES}),
    ):
        given = {**body, **fields} if "messages" in prompt else body
        *events, end = post(tiny_server, path, **given, **prompt, **options).text.rstrip().split("\n\n")
        assert end == "data: [DONE]"
        for event in events:
            model.model_validate(json.loads(event.removeprefix("data: ")))


def test_errors_are_as_described(tiny_server: Running):
    schemas.OpenAIError.model_validate_json(post(tiny_server, "/v1/completions").content)
