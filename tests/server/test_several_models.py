"""`kvreclaim serve --models`: several models behind one server, each in a process while it is used."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import psutil
import pytest
import web
from running import Running
from serve_command import Served, served
from steering import LIMIT_S, until

MODEL, KEY = "kvreclaim-demo", "router-key"
PROMPT = {"prompt": "GO wind wave", "max_tokens": 24, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "GO sky sun"}], "max_tokens": 24, "temperature": 0}
LONG = {"model": MODEL, "prompt": "GO wind", "n": 8, "max_tokens": 4000, "ignore_eos": True, "stream": True}
SIZES = {"num-blocks": 600, "max-num-seqs": 8, "engine-process": False}


@contextmanager
def several(folder: Path, presets: dict[str, Any], *options: str) -> Iterator[Served]:
    file = folder / "models.yaml"
    file.write_text(json.dumps(presets))
    with served(folder, *options, model=("--models", str(file))) as server:
        yield server


def states(server: Served, **headers: str) -> dict[str, str]:
    listed = web.get(f"{server.base_url}/v1/models", headers=headers).json()["data"]
    return {each["id"]: each["status"]["value"] for each in listed}


def metric(server: Served, name: str) -> float:
    text = web.get(f"{server.base_url}/metrics").text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"kvreclaim:{name}")))


def post(base_url: str, path: str, body: dict[str, Any]) -> httpx2.Response:
    return web.post(base_url + path, json=body)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Callable[[str], Path]) -> Iterator[Served]:
    """Two large models and a small one, in a memory that one large and the small one fill."""
    presets = {
        MODEL: {"model": "demo", "served-model-name": "alias", "memory-limit": 3, **SIZES},
        "tiny": {"model": str(tiny_dir("llama")), "memory-limit": 3, **SIZES},
        "small": {"model": str(tiny_dir("llama")), "memory-limit": 1, **SIZES},
    }
    limits = ("--memory-limit", "4", "--shutdown-timeout", str(LIMIT_S))
    with several(tmp_path_factory.mktemp("router"), presets, *limits) as router:
        yield router


def test_a_model_is_loaded_once_at_first_use_and_answers_as_alone(router: Served, server: Running) -> None:
    assert states(router) == dict.fromkeys((MODEL, "alias", "tiny", "small"), "unloaded")
    request = ["/v1/completions", {"model": MODEL, **PROMPT}]
    with ThreadPoolExecutor(3) as pool:
        answers = [each.result() for each in [pool.submit(post, router.base_url, *request) for _ in range(3)]]
    alone = post(server.base_url, *request).json()["choices"]
    assert [answer.json()["choices"] for answer in answers] == [alone] * 3
    assert metric(router, "model_loads_total") == 1
    assert (states(router)["alias"], states(router)["tiny"]) == ("loaded", "unloaded")
    entry = web.get(f"{router.base_url}/v1/models/{MODEL}").json()
    assert (
        entry["max_model_len"]
        == web.get(f"{router.base_url}/props?model=alias").json()["default_generation_settings"]["n_ctx"]
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_dialects_pass_byte_for_byte(router: Served, server: Running, path: str, stream: bool) -> None:
    body = {"model": MODEL, **CHAT, "stream": stream}
    if path == "/v1/responses":
        body = {"model": MODEL, "input": "GO sky", "max_output_tokens": 9, "temperature": 0, "stream": stream}
    ours, alone = (post(base_url, path, body) for base_url in (router.base_url, server.base_url))
    assert (ours.status_code, ours.headers["content-type"]) == (200, alone.headers["content-type"])
    assert texts(ours.text) == texts(alone.text)
    assert ours.headers["x-request-id"].removeprefix("req-") in ours.text


def texts(answer: str) -> list[tuple[str, str]]:
    """The texts of an answer or of its events, joined by kind: how steps are merged into events depends on
    time."""
    found: dict[str, str] = {}
    for kind, text in re.findall(r'"(text|content|delta|thinking)":"((?:[^"\\]|\\.)*)"', answer):
        found[kind] = found.get(kind, "") + text
    assert "".join(found.values())
    return sorted(found.items())


def test_clients_of_both_dialects(router: Served) -> None:
    with (
        openai.OpenAI(base_url=f"{router.base_url}/v1", api_key="any", max_retries=0) as ours,
        anthropic.Anthropic(base_url=router.base_url, api_key="any", max_retries=0) as theirs,
    ):
        assert ours.chat.completions.create(model="alias", **CHAT).choices[0].message.content
        assert theirs.messages.create(model=MODEL, messages=CHAT["messages"], max_tokens=9).content[0].text
        assert [model.id for model in theirs.models.list(limit=2)] == [MODEL, "alias", "tiny", "small"]
        kept = ours.responses.create(model=MODEL, input="GO sky", max_output_tokens=9)
        assert ours.responses.retrieve(kept.id).output_text == kept.output_text
        with pytest.raises(openai.NotFoundError, match="'nonesuch' is not served here; this server has"):
            ours.chat.completions.create(model="nonesuch", **CHAT)
        with pytest.raises(anthropic.NotFoundError, match="this server has kvreclaim-demo, alias, tiny, sm"):
            theirs.messages.create(model="nonesuch", messages=CHAT["messages"], max_tokens=9)
        with pytest.raises(openai.BadRequestError, match=r"names no model; pass `model`"):
            ours.post("/tokenize", body={"prompt": "a"}, cast_to=object)
        with pytest.raises(openai.InternalServerError, match="'tiny' is not loaded; a POST request loads it"):
            ours.get(f"{router.base_url}/props?model=tiny", cast_to=object)


def test_a_client_that_leaves_ends_its_request(router: Served) -> None:
    with web.stream("POST", f"{router.base_url}/v1/completions", json=LONG) as answer:
        next(answer.iter_lines())
    aborted = re.compile(r'^vllm:request_success_total\{[^}]*"abort"[^}]*\} 8\.0$', re.MULTILINE)
    until(lambda: aborted.search(web.get(f"{router.base_url}/metrics?model={MODEL}").text))


def test_the_least_recently_used_is_unloaded_for_room_but_never_a_busy_one(router: Served) -> None:
    for model in (MODEL, "small"):
        assert post(router.base_url, "/v1/completions", {"model": model, **PROMPT}).status_code == 200
    assert states(router) == {MODEL: "loaded", "alias": "loaded", "tiny": "unloaded", "small": "loaded"}
    with (
        ThreadPoolExecutor(1) as pool,
        web.stream("POST", f"{router.base_url}/v1/completions", json=LONG) as stream,
    ):
        lines = stream.iter_lines()  # closed by its own end, too
        next(lines)
        waiting = pool.submit(post, router.base_url, "/v1/completions", {"model": "tiny", **PROMPT})
        until(lambda: "tiny waits until" in router.log.read_text())
        # The end of the small one would not make room enough.
        assert states(router) == {MODEL: "loaded", "alias": "loaded", "tiny": "unloaded", "small": "loaded"}
        stream.close()
        assert waiting.result().status_code == 200
    # The small one was used least recently.
    assert states(router) == {MODEL: "unloaded", "alias": "unloaded", "tiny": "loaded", "small": "unloaded"}
    for model in ("small", MODEL):
        assert post(router.base_url, "/v1/completions", {"model": model, **PROMPT}).status_code == 200
    assert states(router) == {MODEL: "loaded", "alias": "loaded", "tiny": "unloaded", "small": "loaded"}
    assert set(re.findall(r"SIGTERM: no new requests; (\d+) to finish", router.log.read_text())) == {"0"}


def test_a_response_in_the_background_keeps_its_model(router: Served) -> None:
    body = {"model": MODEL, "input": "GO sky", "background": True, "max_output_tokens": 4000}
    kept = post(router.base_url, "/v1/responses", body | {"ignore_eos": True}).json()["id"]
    with ThreadPoolExecutor(1) as pool:
        num_waits = router.log.read_text().count("tiny waits until")
        waiting = pool.submit(post, router.base_url, "/v1/completions", {"model": "tiny", **PROMPT})
        until(lambda: router.log.read_text().count("tiny waits until") > num_waits)
        assert web.get(f"{router.base_url}/v1/responses/{kept}").json()["status"] == "in_progress"
        assert post(router.base_url, f"/v1/responses/{kept}/cancel", {}).json()["status"] == "cancelled"
        assert waiting.result().status_code == 200


def processes(server: Served) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children()


def test_a_process_that_dies_is_reported_and_started_again(router: Served) -> None:
    before = {process.pid for process in processes(router)}
    with web.stream("POST", f"{router.base_url}/v1/completions", json=LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        for process in processes(router):
            process.kill()
        last = [line for line in lines if line.startswith("data: ")][-1]
    assert "the model's process has ended; send the request again" in last
    until(lambda: set(states(router).values()) == {"unloaded"})
    assert post(router.base_url, "/v1/completions", {"model": MODEL, **PROMPT}).status_code == 200
    assert not before & {process.pid for process in processes(router)}


def test_a_signal_lets_requests_end_and_stops_every_process(router: Served) -> None:
    assert post(router.base_url, "/v1/completions", {"model": MODEL, **PROMPT}).status_code == 200
    family = psutil.Process(router.process.pid).children(recursive=True)
    assert family
    body = {**LONG, "n": 1, "max_tokens": 900}
    with web.stream("POST", f"{router.base_url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        router.process.send_signal(signal.SIGINT)
        rest = [line for line in lines if line.startswith("data: ")]
    assert '"finish_reason":"length"' in "".join(rest)
    assert router.process.wait(LIMIT_S) == 0
    assert not any(process.is_running() for process in family)


def test_idle_models_are_unloaded_and_keys_hold_for_every_process(tmp_path: Path) -> None:
    presets = {
        "demo": {"model": "demo", **SIZES, "engine-process": True},
        "broken": {"model": "demo", "num-blocks": 1 << 30},
    }
    own = {"authorization": f"Bearer {KEY}"}
    with (
        several(tmp_path, presets, "--api-key", KEY, "--idle-timeout", "1", "--max-loaded", "1") as router,
        ThreadPoolExecutor(2) as pool,
    ):
        body, url = {"model": "demo", **PROMPT}, f"{router.base_url}/v1/completions"
        assert web.post(url, json=body).status_code == 401
        assert web.post(url, json=body, headers=own).status_code == 200
        until(lambda: "unloaded demo" in router.log.read_text())
        assert states(router, **own) == {"demo": "unloaded", "broken": "unloaded"}
        failed = web.post(url, json={**body, "model": "broken"}, headers=own)
        assert failed.status_code == 503
        assert "'broken' did not start (exit code 2)" in failed.json()["error"]["message"]
        keyed = pool.submit(web.post, url, json=body, headers=own)
        until(lambda: [child.children() for child in processes(router)] not in ([], [[]]))
        [child] = processes(router)
        family = [child, *child.children()]
        [port] = {each.laddr.port for each in child.net_connections() if each.status == "LISTEN"}
        keyless = pool.submit(web.post, f"http://127.0.0.1:{port}/v1/completions", json=body)
        assert (keyed.result().status_code, keyless.result().status_code) == (200, 401)
        assert KEY not in " ".join(child.cmdline())
        router.process.kill()
        psutil.wait_procs(family, LIMIT_S)
        assert not any(process.is_running() for process in family)
