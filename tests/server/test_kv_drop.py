"""kv_drop over HTTP: the tokens that leave the cache, in every dialect, and usage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import web
from running import MODEL, Running, running_server

from kvreclaim import LLM, SamplingParams
from kvreclaim.engine.api.chat import PLACEHOLDER

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content | trim }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
RESULT = "the end of the story, then the stop; " * 6
GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SIZE = 16


@pytest.fixture(scope="module")
def server(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    llm = LLM(tiny_dir("llama"), num_blocks=400, dtype="float32", conversation_snapshots=True)
    with running_server(llm, chat_template=TEMPLATE, reasoning_parser="think") as running:
        yield running


@pytest.fixture(scope="module")
def oracle(tiny_dir: Callable[[str], Path]) -> LLM:
    return LLM(tiny_dir("llama"), num_blocks=400, dtype="float32", enable_prefix_caching=False)


def post(server: Running, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = web.post(server.base_url + path, json={"model": MODEL, **GREEDY, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def chat(server: Running, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return post(server, "/v1/chat/completions", messages=messages, return_token_ids=True, **more)


def conversation(**drop: Any) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "the story"},
        {"role": "user", "content": "then what?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": f" {RESULT} \n", **drop},
    ]


def token_range(oracle: LLM, ids: list[int], text: str) -> tuple[int, int]:
    """Tokens that begin and end within a text of the prompt."""
    pieces = [oracle.tokenizer.decode([token]) for token in ids]
    start = "".join(pieces).index(text)
    begins = [sum(map(len, pieces[:i])) for i in range(len(pieces) + 1)]
    inside = [i for i in range(len(ids)) if start <= begins[i] and begins[i + 1] <= start + len(text)]
    return inside[0], inside[-1] + 1


def test_a_result_of_a_tool_leaves_the_cache(server: Running, oracle: LLM) -> None:
    """The prompt is the same, only new tokens are computed, and they do not see the result; the turn after
    that begins with the tokens that are left."""
    first = chat(server, conversation())
    turn = [first["choices"][0]["message"], {"role": "user", "content": "and then the end?"}]
    whole = chat(server, conversation() + turn, max_tokens=1, cache_salt="other")["prompt_token_ids"]
    second = chat(server, conversation(kv_drop="lossy") + turn)
    ids, usage = second["prompt_token_ids"], second["usage"]
    assert ids == whole
    start, end = token_range(oracle, ids, RESULT.strip())
    num_dropped = (end // SIZE - -(-start // SIZE)) * SIZE
    assert usage["kv_cache"]["dropped_tokens"] == num_dropped > 4 * SIZE
    at, _ = token_range(oracle, ids, "and then the end?")
    known = len(first["prompt_token_ids"]) + len(first["choices"][0]["token_ids"])
    assert usage["prompt_tokens_details"]["cached_tokens"] == min(known, at) // SIZE * SIZE
    options = {"prompt_token_ids": ids, "drop_spans": [(start, end)], "drop_at": at}
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    [expected] = oracle.generate([options], params)[0].outputs
    assert second["choices"][0]["token_ids"] == expected.token_ids
    turn += [second["choices"][0]["message"], {"role": "user", "content": "stop"}]
    usage = chat(server, conversation(kv_drop=True) + turn)["usage"]
    assert usage["prompt_tokens_details"]["snapshot_tokens"] >= at
    assert usage["kv_cache"]["dropped_tokens"] == num_dropped


def test_a_placeholder_stands_for_it(server: Running, oracle: LLM) -> None:
    turn = [{"role": "assistant", "content": "then"}, {"role": "user", "content": "and?"}]
    found = chat(server, conversation(kv_drop="exact") + turn)
    text = oracle.tokenizer.decode(found["prompt_token_ids"])
    assert f"<tool_response>\n{PLACEHOLDER}\n</tool_response>;assistant:then;" in text
    assert RESULT[:20] not in text
    assert found["usage"]["kv_cache"]["dropped_tokens"] == 0
    assert (
        chat(server, conversation(kv_drop=None) + turn)["prompt_token_ids"]
        == (chat(server, conversation(kv_drop=False) + turn)["prompt_token_ids"])
    )


def test_beams(server: Running) -> None:
    messages = [*conversation(kv_drop="lossy"), {"role": "user", "content": "and?"}]
    beams = {"temperature": None, "use_beam_search": True}
    [alone, searched] = [chat(server, messages, **more)["usage"] for more in ({}, {**beams, "n": 2})]
    dropped = alone["kv_cache"]["dropped_tokens"]
    assert searched["kv_cache"]["dropped_tokens"] == dropped > 4 * SIZE


def test_messages(server: Running) -> None:
    """Anthropic's blocks: a result, and one of two texts."""
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    mark = {"cache_control": {"type": "ephemeral"}}

    def ask(result: dict[str, Any], text: dict[str, Any], **more: Any) -> dict[str, Any]:
        texts = [{"type": "text", "text": "then"}, {"type": "text", "text": RESULT, **text}]
        answer = {"type": "tool_result", "tool_use_id": "c", "content": RESULT, **result}
        messages = [
            {"role": "user", "content": texts},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [answer]},
            {"role": "assistant", "content": "so"},
            {"role": "user", "content": [{"type": "text", "text": "and?", **mark}]},
        ]
        return post(server, "/v1/messages", messages=messages, **more)

    whole = ask({}, {})
    for result, text, least in (
        ({"kv_drop": "lossy"}, {}, 4),
        ({}, {"kv_drop": True}, 4),
        ({"kv_drop": "lossy"}, {"kv_drop": "lossy"}, 8),
    ):
        usage = ask(result, text)["usage"]
        assert usage["kv_cache"]["dropped_tokens"] >= least * SIZE
        assert sum(usage[f"{name}input_tokens"] for name in ("", "cache_read_", "cache_creation_")) == sum(
            whole["usage"][f"{name}input_tokens"] for name in ("", "cache_read_", "cache_creation_")
        )
    exact = ask({"kv_drop": "exact"}, {"kv_drop": "exact"})["usage"]
    assert exact["kv_cache"]["dropped_tokens"] == 0
    assert exact["cache_read_input_tokens"] + exact["input_tokens"] < 200
    compression = {"policy": "knorm", "budget": 64, "interval": 32, "sinks": 4, "recent": 8}
    usage = ask({"kv_drop": "lossy"}, {}, kv_compression=compression)["usage"]
    assert usage["kv_cache"]["dropped_tokens"] > 0


def test_responses(server: Running) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    items = [
        {"role": "user", "content": "then what?"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": RESULT, "kv_drop": "lossy"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "and?"},
    ]
    body = {"model": MODEL, "temperature": 0, "max_output_tokens": 4, "store": False}
    answer = web.post(f"{server.base_url}/v1/responses", json={**body, "input": items})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["kv_cache"]["dropped_tokens"] > 4 * SIZE
    answer = web.post(f"{server.base_url}/v1/responses", json={**body, "input": items[:3]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input.2.kv_drop"


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        (conversation(kv_drop="lossy"), {}, "messages.3.kv_drop"),
        (conversation(kv_drop="exact"), {}, "messages.3.kv_drop"),
        (conversation(kv_drop="gone") + conversation()[1:2], {}, "messages.3.kv_drop"),
        ([{**conversation()[0], "kv_drop": True}, conversation()[1]], {}, "messages.0.kv_drop"),
        ([{"role": "user", "content": " ", "kv_drop": True}, conversation()[1]], {}, "messages.0.kv_drop"),
        (conversation(kv_drop=True) + conversation()[1:2], {"documents": ["a"]}, "messages.3.kv_drop"),
        (
            conversation(kv_drop=True) + conversation()[1:2],
            {"kv_compression": {"policy": "quest"}},
            "kv_drop",
        ),
    ],
)
def test_refused_by_name(messages: list[Any], options: dict[str, Any], param: str, server: Running) -> None:
    error = post(server, "/v1/chat/completions", 400, messages=messages, **options)["error"]
    assert error["param"] == param
    assert "kv_drop" in error["message"]


def test_a_template_that_changes_texts(tiny_dir: Callable[[str], Path]) -> None:
    llm = LLM(tiny_dir("llama"), num_blocks=40)
    template = TEMPLATE.replace("trim", "upper")
    with running_server(llm, chat_template=template) as shouting:
        messages = conversation(kv_drop="lossy") + conversation()[1:2]
        error = post(shouting, "/v1/chat/completions", 400, messages=messages)["error"]
        assert error["param"] == "messages.3.kv_drop"
        messages = conversation(kv_drop="exact") + conversation()[1:2]
        assert post(shouting, "/v1/chat/completions", messages=messages)["choices"]
