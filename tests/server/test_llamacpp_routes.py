"""Routes of llama.cpp's server, embeddings refused, and pages of other origins that the operator allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import web
from running import MODEL, Running, running_server

from kvreclaim import LLM, InvalidArgumentError
from kvreclaim.server.base.config import ServerConfig

PAGE = "http://localhost:3000"
KEY = "key"


@pytest.fixture(scope="module")
def server(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    llm = LLM(tiny_dir("llama"), num_blocks=128, max_num_seqs=7, max_model_len=300)
    with running_server(llm, allowed_origins=(PAGE,), api_keys=(KEY,)) as running:
        yield running


def headers(**more: str) -> dict[str, str]:
    return {"x-api-key": KEY, **more}


def test_props_are_those_of_the_model(server: Running) -> None:
    props = web.get(f"{server.base_url}/props", headers=headers()).json()
    assert props["total_slots"] == 7
    assert props["default_generation_settings"]["n_ctx"] == 300
    assert props["chat_template"]
    assert props["modalities"] == {"vision": False, "audio": False}


def test_a_template_is_applied_as_a_chat_applies_it(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    text = web.post(f"{server.base_url}/apply-template", json=body, headers=headers()).json()["prompt"]
    of_chat = web.post(f"{server.base_url}/tokenize", json=body, headers=headers()).json()["tokens"]
    plain = {"prompt": text, "add_special_tokens": False}
    assert web.post(f"{server.base_url}/tokenize", json=plain, headers=headers()).json()["tokens"] == of_chat


def test_content_is_another_name_of_prompt(server: Running) -> None:
    def tokens(**body: str) -> list[int]:
        found: list[int] = web.post(f"{server.base_url}/tokenize", json=body, headers=headers()).json()[
            "tokens"
        ]
        return found

    ids = tokens(content="some text")
    assert ids == tokens(prompt="some text")
    back = web.post(f"{server.base_url}/detokenize", json={"tokens": ids}, headers=headers()).json()
    assert back["content"] == back["prompt"]
    both = web.post(f"{server.base_url}/tokenize", json={"content": "a", "prompt": "a"}, headers=headers())
    assert both.status_code == 400
    assert "two names" in both.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_embeddings_are_refused_with_an_alternative(server: Running, path: str) -> None:
    answer = web.post(server.base_url + path, json={"input": "a"}, headers=headers())
    assert answer.status_code == 404
    assert "llama-server --embedding" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/nonesuch"])
def test_head_is_get_without_a_body(server: Running, path: str) -> None:
    got, head = (web.request(each, server.base_url + path, headers=headers()) for each in ("GET", "HEAD"))
    assert head.status_code == got.status_code
    assert head.headers["content-length"] == got.headers["content-length"]
    assert head.content == b""


def test_a_page_of_an_allowed_origin_may_call(server: Running) -> None:
    """Its preflight carries no key; the call itself needs one, and may read a refusal."""
    url = f"{server.base_url}/v1/completions"
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = web.request("OPTIONS", url, headers={"origin": PAGE, **wanted})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    answer = web.post(url, json=body, headers=headers(origin=PAGE, **{"sec-fetch-site": "cross-site"}))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    refused = web.post(url, json=body, headers={"origin": PAGE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE
    other = web.request("OPTIONS", url, headers={"origin": "https://other.example", **wanted})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["localhost:3000", "http://localhost:3000/", "ftp://a", ""])
def test_an_origin_is_scheme_host_and_port(origin: str) -> None:
    with pytest.raises(InvalidArgumentError, match="allowed_origins has"):
        ServerConfig(served_model_name=("m",), allowed_origins=(origin,))


def test_the_likeliest_token_by_top_p_0(server: Running) -> None:
    def text(**sampling: float) -> str:
        body = {"model": MODEL, "prompt": "once", "max_tokens": 8, "seed": 3} | sampling
        found: str = web.post(f"{server.base_url}/v1/completions", json=body, headers=headers()).json()[
            "choices"
        ][0]["text"]
        return found

    assert text(top_p=0, temperature=1.7) == text(temperature=0)


def test_a_tool_message_may_have_a_name(server: Running) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "b", "name": "f"},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    answer = web.post(f"{server.base_url}/v1/chat/completions", json=body, headers=headers())
    assert answer.status_code == 200, answer.text


def test_the_servers_system_prompt(tiny_dir: Callable[[str], Path]) -> None:
    """In conversations that have none, of every dialect."""
    user = {"role": "user", "content": "hello"}
    own = [{"role": "system", "content": "Be terse."}, user]
    with running_server(LLM(tiny_dir("llama"), num_blocks=64), system="Be terse.") as with_default:
        url = f"{with_default.base_url}/apply-template"
        prompt = web.post(url, json={"messages": [user]}).json()["prompt"]
        assert prompt == web.post(url, json={"messages": own}).json()["prompt"]
        assert prompt.count("Be terse.") == 1
        other = [{"role": "system", "content": "Be kind."}, user]
        assert "terse" not in web.post(url, json={"messages": other}).json()["prompt"]
        counted = web.post(
            f"{with_default.base_url}/v1/messages/count_tokens", json={"model": MODEL, "messages": [user]}
        ).json()["input_tokens"]
        assert (
            counted == web.post(f"{with_default.base_url}/tokenize", json={"messages": own}).json()["count"]
        )
