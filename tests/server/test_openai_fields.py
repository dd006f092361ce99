"""Every field that is accepted has an effect; the tables here hold all fields there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import web
from running import MODEL, running_server
from steering import PendingRequest, paused, until
from talking import GREEDY, OTHER_NAME, PROMPT, Talker, talker
from test_openai_sampling import SAMPLING

from kvreclaim import BeamSearchParams, Chunk, CompressionConfig, SamplingParams
from kvreclaim.server.openai.chat import ChatRequest
from kvreclaim.server.openai.completions import CompletionRequest

TOOLS = [{"type": "function", "function": {"name": "weather"}}]
COMPRESSION = {"policy": "knorm", "budget": 32, "interval": 16, "sinks": 2, "recent": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talker(tmp_path_factory.mktemp("talker")) as server:
        yield server


def check_model(server: Talker) -> None:
    assert server.completion(model=OTHER_NAME)["model"] == OTHER_NAME
    assert server.refused(model="zoo") == "model"


def check_prompt(server: Talker) -> None:
    assert server.text(**GREEDY) != server.text(prompt="then", **GREEDY)


def check_messages(server: Talker) -> None:
    assert server.prompt() == f"user:{PROMPT};assistant:"


def check_stream(server: Talker) -> None:
    body = {"model": MODEL, "prompt": PROMPT, **GREEDY}
    streamed = web.post(f"{server.running.base_url}/v1/completions", json={**body, "stream": True})
    assert streamed.text.startswith("data: ")
    assert "choices" in server.completion(**GREEDY, stream=False)


def check_stream_options(server: Talker) -> None:
    body = {"model": MODEL, "prompt": PROMPT, **GREEDY, "stream": True}
    address = f"{server.running.base_url}/v1/completions"
    options = {"include_usage": True}
    assert "usage" not in web.post(address, json=body).text
    assert '"usage":null' in web.post(address, json={**body, "stream_options": options}).text
    options["continuous_usage_stats"] = True
    assert '"usage":null' not in web.post(address, json={**body, "stream_options": options}).text


def check_echo(server: Talker) -> None:
    assert server.text(**GREEDY, echo=True) == PROMPT + server.text(**GREEDY)


def check_completion_logprobs(server: Talker) -> None:
    assert server.completion(**GREEDY)["choices"][0]["logprobs"] is None
    for top in (1, 3):
        found = server.completion(**GREEDY, logprobs=top)["choices"][0]["logprobs"]["top_logprobs"]
        assert max(map(len, found)) == top, "fewer only where two tokens look alike"


def check_chat_logprobs(server: Talker) -> None:
    assert server.chat(**GREEDY)["choices"][0]["logprobs"] is None
    assert len(server.chat(**GREEDY, logprobs=True)["choices"][0]["logprobs"]["content"]) == 12


def check_top_logprobs(server: Talker) -> None:
    for top in (0, 3):
        answer = server.chat(**GREEDY, logprobs=True, top_logprobs=top)
        assert {len(e["top_logprobs"]) for e in answer["choices"][0]["logprobs"]["content"]} == {top}


def check_prompt_logprobs(server: Talker) -> None:
    assert "prompt_logprobs" not in server.completion(**GREEDY)["choices"][0]
    assert server.completion(**GREEDY, prompt_logprobs=1)["choices"][0]["prompt_logprobs"][0] is None


def check_return_token_ids(server: Talker) -> None:
    expected = server.oracle.generate(PROMPT, SamplingParams(**GREEDY))[0].outputs[0].token_ids
    assert "token_ids" not in server.completion(**GREEDY)["choices"][0]
    assert server.completion(**GREEDY, return_token_ids=True)["choices"][0]["token_ids"] == expected


def check_add_special_tokens(server: Talker) -> None:
    counts = [
        server.completion(**GREEDY, **more)["usage"]["prompt_tokens"]
        for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
    ]
    assert counts == [counts[0], counts[0], counts[0] - 1]


def check_max_completion_tokens(server: Talker) -> None:
    assert server.chat(temperature=0.0, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def check_tools(server: Talker) -> None:
    assert '"name": "weather"' in server.prompt(tools=TOOLS)


def check_tool_choice(server: Talker) -> None:
    assert "weather" not in server.prompt(tools=TOOLS, tool_choice="none")
    assert "weather" in server.prompt(tools=TOOLS, tool_choice="auto")


def check_add_generation_prompt(server: Talker) -> None:
    assert server.prompt(add_generation_prompt=False) == f"user:{PROMPT};"


def check_continue_final_message(server: Talker) -> None:
    assert server.prompt(continue_final_message=True) == f"user:{PROMPT}"


def check_chat_template_kwargs(server: Talker) -> None:
    assert server.prompt(chat_template_kwargs={"mood": "dark"}) == f"user:{PROMPT};darkassistant:"


def check_response_format(server: Talker) -> None:
    """Its other effects: test_structured_http.py."""
    assert server.chat(**GREEDY, response_format={"type": "text"})["choices"]
    path = "/v1/chat/completions"
    assert server.refused(path, response_format={"type": "yaml"}) == "response_format.type"


def cached(server: Talker, **fields: Any) -> int:
    prompt = list(range(40, 80))
    usage = server.completion(prompt=prompt, max_tokens=1, **fields)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def check_cache_salt(server: Talker) -> None:
    salts = ["a", "b", "a", "b"]
    assert [cached(server, cache_salt=salt) for salt in salts] == [0, 0, 32, 32]


def kept_s(server: Talker, **fields: Any) -> int | None:
    """For how many seconds the blocks of a new prompt are kept; None: as long as those of any other."""
    pins, now = server.running.llm.engine.memory.pool.pins, 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pins, "_clock", lambda: now)
        pins.clear()
        server.completion(prompt=list(range(100, 140)), max_tokens=1, **fields)
        num_pinned = len(pins)
        assert num_pinned in (0, 40 // 16)
        for now in (300, 86_400):
            if not num_pinned:
                return None
            now -= 1
            pins.expire()
            assert len(pins) == num_pinned
            now += 1
            pins.expire()
            if not pins:
                return now
    raise AssertionError("kept for longer than any request may ask")


def check_prompt_cache_key(server: Talker) -> None:
    assert kept_s(server) is None
    assert kept_s(server, prompt_cache_key="chapter one") == 300


def check_prompt_cache_retention(server: Talker) -> None:
    assert kept_s(server, prompt_cache_retention="in_memory") == 300
    assert kept_s(server, prompt_cache_retention="in-memory") == 300
    assert kept_s(server, prompt_cache_retention="24h") == 86_400
    assert kept_s(server, prompt_cache_retention="24h", prompt_cache_key="chapter one") == 86_400


def check_agent_hint(server: Talker) -> None:
    """Full blocks of the answer are kept, too."""
    assert kept_s(server, agent_hint={"cache_control": {"ttl": 300}}) == 300
    hint = {"cache_control": {"type": "ephemeral"}}
    assert kept_s(server, agent_hint=hint) == 300
    assert kept_s(server, agent_hint={"cache_control": None}) is None
    assert kept_s(server, agent_hint=hint, prompt_cache_retention="24h") == 86_400, "the longest holds"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(server.running.service.engine.served.config, "enable_prefix_caching", False)
        assert server.refused(agent_hint=hint) == "agent_hint.cache_control"
    pins = server.running.llm.engine.memory.pool.pins
    for number, (fields, num_blocks) in enumerate(
        (({"agent_hint": {"cache_control": {}}}, 5), ({"prompt_cache_key": "a"}, 2))
    ):
        pins.clear()
        server.completion(prompt=[200 + number] * 40, max_tokens=41, ignore_eos=True, **fields)
        assert len(pins) == num_blocks
    pins.clear()


def check_user(server: Talker, field: str = "user") -> None:
    lines: list[dict[str, Any]] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = getattr(record, "fields", {})
            lines.extend([fields] if "user" in fields else [])  # lines of earlier requests may still come

    logger, handler = logging.getLogger("kvreclaim.access"), Catch()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        server.completion(**GREEDY, **{field: "somebody"})
        until(lambda: lines)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert lines[0]["user"] == "somebody"


def check_safety_identifier(server: Talker) -> None:
    check_user(server, "safety_identifier")


class Order:
    """Notes the order in which requests end."""

    def __init__(self) -> None:
        self.priorities: list[int] = []

    def added(self, *_: object) -> None: ...

    def stepped(self, *_: object) -> None: ...

    def ended(self, _: object, request: Any) -> None:
        self.priorities.append(request.spec.priority)


def check_priority(server: Talker) -> None:
    """Eight requests for four seats: the ones with the lower numbers go first, whenever they came."""
    engine, order = server.running.service.engine, Order()
    observers = engine.host.observers
    engine.host.observers = (*observers, order)
    try:
        with paused(server.running):
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
            priorities = [5, 5, 5, 5, -1, -1, -2, -1]
            sent = []
            for number, priority in enumerate(priorities):
                sent.append(PendingRequest(server.running, "/v1/completions", {**body, "priority": priority}))
                until(lambda number=number: engine.num_queued == number + 1)
        assert {each.answer().status_code for each in sent} == {200}
    finally:
        engine.host.observers = observers
    assert order.priorities == sorted(priorities)


def check_kv_compression(server: Talker) -> None:
    prompt = [40 + i % 90 for i in range(120)]
    expected = server.oracle.generate([prompt], SamplingParams(**GREEDY), CompressionConfig(**COMPRESSION))[0]
    given = server.completion(prompt=prompt, **GREEDY, kv_compression=COMPRESSION)
    assert given["choices"][0]["text"] == expected.outputs[0].text
    assert given["usage"]["kv_cache"]["blocks_freed"] == expected.metrics.blocks_freed > 0
    assert server.completion(prompt=prompt, **GREEDY)["usage"]["kv_cache"]["blocks_freed"] == 0


def check_compress_prompt_at(server: Talker) -> None:
    prompt = [41 + i % 90 for i in range(120)]
    extra = {"kv_compression": COMPRESSION, "compress_prompt_at": 110}
    expected = server.oracle.generate(
        {"prompt_token_ids": prompt, "compress_prompt_at": 110},
        SamplingParams(**GREEDY),
        CompressionConfig(**COMPRESSION),
    )[0]
    for cached in (0, 110):
        given = server.completion(prompt=prompt, **GREEDY, **extra)
        assert given["choices"][0]["text"] == expected.outputs[0].text
        assert given["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert server.refused(prompt=prompt, compress_prompt_at=20) == "compress_prompt_at", "evicts nothing"


def check_conversation_snapshots(server: Talker) -> None:
    """This server keeps none unless a request has the field."""
    prompt, snapshot_tokens = [42 + i % 90 for i in range(120)], []
    for keep in (True, True, False, None):
        fields = {"conversation_snapshots": keep, "kv_compression": COMPRESSION, "return_token_ids": True}
        answer = server.completion(prompt=prompt, **GREEDY, **fields)
        snapshot_tokens.append(answer["usage"]["prompt_tokens_details"]["snapshot_tokens"])
        prompt += answer["choices"][0]["token_ids"] + [7, 8]
    assert snapshot_tokens == [0, 131, 0, 0]
    assert server.refused(conversation_snapshots="no") == "conversation_snapshots"


def check_sparse_prefill(server: Talker) -> None:
    """Beside a server whose prompts are computed sparsely: exact, with what needs it."""
    method = "a_shape(first=32, last=16, layers=0, block=16, sinks=16, local=16)"
    prompt = [42 + i * i % 90 for i in range(200)]
    ask = {"model": MODEL, "prompt": prompt, **GREEDY, "sparse_prefill": "dense", "logprobs": 0}
    with running_server(server.oracle.sibling(num_blocks=64, sparse_prefill=method)) as sparse:
        address = f"{sparse.base_url}/v1/completions"
        exact = web.post(address, json=ask).json()["choices"][0]
        assert exact["text"] == server.completion(prompt=prompt, **GREEDY)["choices"][0]["text"]
        approximate = web.post(address, json={**ask, "sparse_prefill": None}).json()["choices"][0]
        assert approximate["logprobs"]["token_logprobs"] != exact["logprobs"]["token_logprobs"]
        assert web.post(address, json={**ask, "prompt_logprobs": 0}).status_code == 200
        given = web.post(address, json={**ask, "prompt_logprobs": 0, "sparse_prefill": None})
        assert given.status_code == 400
    assert server.refused(sparse_prefill="pooled") == "sparse_prefill"


DOCUMENTS = ["the sun and the wave " * 8, {"title": "Stars", "text": "stars mist vale " * 9}]
QUESTION = "what was said of the sun"


def check_documents(server: Talker) -> None:
    """Documents are the engine's chunks, in any order; in a chat, before the last user message."""
    sun, stars = DOCUMENTS[0] + "\n\n", "Stars\n" + DOCUMENTS[1]["text"] + "\n\n"
    for documents, texts in ((DOCUMENTS, [sun, stars]), (DOCUMENTS[::-1], [stars, sun])):
        (expected,) = server.oracle.generate([*map(Chunk, texts), QUESTION], SamplingParams(**GREEDY))
        answer = server.completion(prompt=QUESTION, documents=documents, **GREEDY)
        assert answer["choices"][0]["text"] == expected.outputs[0].text
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(expected.prompt_token_ids)
        assert usage["kv_cache"]["reused_tokens"] == expected.metrics.num_reused_tokens > 0
    messages = [{"role": "user", "content": "before"}, {"role": "user", "content": QUESTION}]
    prompt = server.prompt(messages=messages, documents=DOCUMENTS)
    assert prompt == f"user:before;user:{sun}{stars}{QUESTION};assistant:"
    assert server.refused(documents=DOCUMENTS, echo=True) == "echo"
    assert server.refused(documents=[""]) == "documents"
    assert server.refused(documents=[]) == "documents"
    messages = [{"role": "system", "content": QUESTION}]
    assert server.refused("/v1/chat/completions", documents=DOCUMENTS, messages=messages) == "documents"


def check_chunk_reuse(server: Talker) -> None:
    def reused(**how) -> int:
        given = server.completion(prompt=QUESTION, documents=DOCUMENTS, **GREEDY, chunk_reuse=how)
        return given["usage"]["kv_cache"]["reused_tokens"]

    assert reused(select="none") > reused(share=0.5) > reused(select="random", share=0.9) > 0
    assert reused(select="all") == 0
    assert server.refused(chunk_reuse={}) == "chunk_reuse"
    assert server.refused(chunk_reuse={"share": 2.0}, documents=DOCUMENTS) == "chunk_reuse"


def beams(server: Talker, **fields) -> list[tuple[str, float]]:
    given = server.completion(prompt=PROMPT, max_tokens=12, use_beam_search=True, **fields)
    return [(choice["text"], round(choice["sequences_scores"], 3)) for choice in given["choices"]]


def searched(server: Talker, **params) -> list[tuple[str, float]]:
    (found,) = server.oracle.beam_search(PROMPT, BeamSearchParams(max_tokens=12, **params))
    return [(each.text, round(each.sequences_scores, 3)) for each in found.outputs]


def check_use_beam_search(server: Talker) -> None:
    assert beams(server, n=2) == searched(server, beam_width=2, num_return_sequences=2)


def check_beam_width(server: Talker) -> None:
    assert beams(server, beam_width=4) == searched(server, beam_width=4)


def check_length_penalty(server: Talker) -> None:
    assert beams(server, n=2, length_penalty=0.0) == searched(
        server, beam_width=2, num_return_sequences=2, length_penalty=0.0
    )


def check_early_stopping(server: Talker) -> None:
    for early in (True, "never"):
        assert beams(server, beam_width=3, early_stopping=early) == searched(
            server, beam_width=3, early_stopping=early
        )


CHECKS: dict[str, Callable[[Talker], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


WITHOUT_EFFECT = {"service_tier", "metadata", "store", "modalities", "prediction", "verbosity"}
ELSEWHERE = {"parallel_tool_calls", "reasoning_effort", "structured_outputs", "thinking_token_budget"}
"""Tested in test_reasoning_http.py, test_structured_http.py and test_thinking_http.py, as are those above."""


def test_no_field_is_missing_here():
    named = {*CHECKS, *SAMPLING} - {"completion_logprobs", "chat_logprobs"} | {"logprobs"}
    named |= WITHOUT_EFFECT | ELSEWHERE
    assert named == {*CompletionRequest.model_fields, *ChatRequest.model_fields}


@pytest.mark.parametrize("field", CHECKS)
def test_what_a_field_does(server: Talker, field: str):
    CHECKS[field](server)
