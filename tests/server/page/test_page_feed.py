"""The page's routes and its feed, without a browser."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import runpy
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import web
from running import MODEL, Running, running_server
from steering import halted, until

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.page.frames import Compaction
from kvreclaim.page.view import IN_USE
from kvreclaim.page.viewer import MAX_PENDING, MAX_VIEWERS, Viewer
from kvreclaim.server.page.snapshot import CompactionRecorder

SCRIPT = Path(__file__).parents[3] / "scripts" / "docs.py"
EXAMPLES = json.loads((files("kvreclaim.server.page") / "examples.json").read_bytes())
COMPRESSION = {"policy": "query_mixture", "budget": 256, "recent": 64, "interval": 64}


@contextmanager
def feed_of(server: Running, **headers: str) -> Iterator[Iterator[tuple[str, Any]]]:
    """(name, data) of the feed's events."""
    url = f"{server.base_url}/page/feed"
    with web.stream("GET", url, headers=headers) as response:
        assert response.status_code == 200
        yield events_in(response)


def events_in(response: httpx2.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def compactions_until(
    events: Iterator[tuple[str, Any]], holds: Callable[[dict[str, Any]], object]
) -> Iterator[dict[str, Any]]:
    """Yield the events of compactions before the next frame of which this holds."""
    for name, data in events:
        if name == "compactions":
            yield data
        elif holds(data):
            return


def cells_of(frame: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(state, owner) of a pool without groups."""
    raw = zlib.decompress(base64.b64decode(frame["cells"]))
    num = frame["shown"]
    return np.frombuffer(raw, np.uint8, offset=2 * num), np.frombuffer(raw, "<u2", count=num)


def complete(server: Running, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": EXAMPLES["demo"][0]["prompt"], "temperature": 0, **fields}
    answer = web.post(f"{server.base_url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def is_watched(server: Running) -> bool:
    return any(isinstance(observer, CompactionRecorder) for observer in server.service.engine.host.observers)


class Outside(HTMLParser):
    """Collect the URLs of a page, and inline code that a strict policy would block."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.urls += [url for name in ("src", "href") if (url := given.get(name))]
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


def test_the_page_loads_from_its_own_server_alone(page_server: Running) -> None:
    answer = web.get(page_server.base_url)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    parser = Outside()
    parser.feed(answer.text)
    assert parser.inline == []
    for url in parser.urls:
        assert url.startswith(("/", "#"))
        if url.startswith("/page/"):
            file = web.get(page_server.base_url + url)
            assert file.status_code == 200
            assert file.headers["x-content-type-options"] == "nosniff"
    static = files("kvreclaim.page") / "static"
    for file in static.iterdir():
        outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w+/\S*", file.read_text())
        assert [url for url in outside if "www.w3.org" not in url] == [], file.name


def test_a_browser_keeps_files_that_have_not_changed(page_server: Running) -> None:
    first = web.get(page_server.base_url)
    again = web.get(page_server.base_url, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Froutes.py", "%2e%2e/routes.py", "../examples.json"])
def test_other_files_are_not_served(page_server: Running, name: str) -> None:
    assert web.get(f"{page_server.base_url}/page/static/{name}").status_code == 404


def test_the_feed_shows_a_request_while_it_runs(page_server: Running) -> None:
    with feed_of(page_server) as events:
        before = next(data for name, data in events if name == "frame")
        assert before["requests"] == []
        thread = threading.Thread(target=complete, args=(page_server,), kwargs={"max_tokens": 500})
        with halted(page_server):
            thread.start()
            frame = next(data for name, data in events if name == "frame" and data["requests"])
        request_id, logical, physical, blocks, evicted, freed, promise = frame["requests"][0]
        state, owner = cells_of(frame)
        assert request_id.startswith("req-")
        assert (owner == 1).sum() == blocks == -(-physical // 16)
        assert (state[owner == 1] == IN_USE).all()
        assert logical >= physical + evicted
        assert (freed, promise) == (0, "")
        assert sum(frame["blocks"].values()) == frame["num_blocks"] == 1024
        assert frame["blocks"]["in_use"] == blocks
        thread.join()
        after = next(data for name, data in events if name == "frame" and not data["requests"])
        assert after["totals"]["generation_tokens"] - before["totals"]["generation_tokens"] == 500


def test_every_compaction_is_an_event(page_server: Running) -> None:
    prompt = EXAMPLES["demo"][1]["prompt"]
    answers: list[dict[str, Any]] = []
    compactions: list[dict[str, Any]] = []

    def ask() -> None:
        fields = {"kv_compression": COMPRESSION, "max_tokens": 300, "ignore_eos": True}
        answers.append(complete(page_server, prompt=prompt, **fields))

    with feed_of(page_server) as events:
        next(events)
        thread = threading.Thread(target=ask)
        with halted(page_server, num_tokens=100):
            thread.start()
            compactions += compactions_until(events, lambda frame: frame["requests"])
        compactions += compactions_until(events, lambda frame: not frame["requests"])
        thread.join()
    cache, passes = answers[0]["usage"]["kv_cache"], [each for data in compactions for each in data["passes"]]
    assert len(passes) > 3
    assert sum(freed for *_, freed, _ in passes) == cache["blocks_freed"]
    assert sum(evicted for *_, evicted in passes) == cache["tokens_evicted"]
    assert all(before - after == freed for _, before, after, freed, _ in passes)
    assert sum(len(np.frombuffer(base64.b64decode(data["blocks"]), "<u4")) for data in compactions) > 0


def test_the_engine_is_not_read_while_no_viewer_watches(page_server: Running) -> None:
    for _ in range(2):
        until(lambda: not is_watched(page_server))
        with feed_of(page_server) as events, feed_of(page_server) as others:
            assert next(events)[0] == next(others)[0] == "frame"
            assert is_watched(page_server)
    until(lambda: not is_watched(page_server))


def test_a_viewer_that_does_not_read_gets_the_last_frame_and_bounded_news() -> None:
    viewer = Viewer()
    for i in range(1000):
        viewer.show(f"frame {i}\n".encode(), [Compaction(f"r{i}", np.arange(5, dtype=np.int32), 9, 4, 5, 80)])
    viewer.dismiss("draining")

    async def read() -> list[bytes]:
        return [chunk async for chunk in viewer.events()]

    first, last = asyncio.run(read())
    assert first.count(b"frame ") == 1
    assert first.endswith(b"frame 999\n")
    passes = json.loads(first.split(b"data: ")[1].split(b"\n")[0])["passes"]
    assert len(passes) == MAX_PENDING
    assert passes[-1] == ["r999", 9, 4, 5, 80]
    assert b"draining" in last


def test_there_is_room_for_so_many_viewers(page_server: Running) -> None:
    url = f"{page_server.base_url}/page/feed"
    with web.Client() as client:
        until(lambda: not is_watched(page_server))
        request = client.build_request("GET", url)
        open_feeds = [client.send(request, stream=True) for _ in range(MAX_VIEWERS)]
        assert [answer.status_code for answer in open_feeds] == [200] * MAX_VIEWERS
        refused = web.get(url)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "5"
        assert next(events_in(open_feeds[-1]))[0] == "frame"
        for answer in open_feeds:
            answer.close()


def test_the_feed_ends_when_the_server_drains() -> None:
    with running_server(LLM(demo_model(), num_blocks=64)) as server, feed_of(server) as events:
        next(events)
        server.loop.call_soon_threadsafe(server.service.draining.set)
        assert [data for name, data in events if name == "end"] == [{"reason": "draining"}]
        assert web.get(f"{server.base_url}/page/feed").status_code == 503


def test_the_page_is_the_operators() -> None:
    with running_server(LLM(demo_model(), num_blocks=64), api_keys=("a", "b"), operator_key="op") as server:
        for path in ("/", "/page/static/main.js", "/page/feed", "/page/settings", "/page/examples"):
            url = server.base_url + path
            refused = web.get(url, headers={"authorization": "Bearer a"})
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"].startswith("Basic ")
            if path != "/page/feed":
                assert web.get(url, auth=("any", "op")).status_code == 200, path
        basic = base64.b64encode(b"any:op").decode()
        with feed_of(server, authorization=f"Basic {basic}") as events:
            assert next(events)[0] == "frame"


def test_every_policy_that_is_offered_runs(page_server: Running) -> None:
    settings = web.get(f"{page_server.base_url}/page/settings").json()
    assert settings["models"] == [MODEL]
    assert {"query_mixture", "streaming_llm", "h2o"} <= set(settings["policies"])
    for policy in settings["policies"]:
        budget = {**COMPRESSION, "policy": policy}
        answer = complete(page_server, max_tokens=2, ignore_eos=True, kv_compression=budget)
        assert answer["usage"]["completion_tokens"] == 2, policy
    body = {"model": MODEL, "prompt": "sun", "kv_compression": {"policy": "oracle"}}
    assert "oracle" not in settings["policies"]
    assert web.post(f"{page_server.base_url}/v1/completions", json=body).status_code == 400


def test_examples_are_those_of_their_script() -> None:
    assert runpy.run_path(str(SCRIPT))["page_examples"]() == EXAMPLES


def test_each_example_is_answered_with_and_without_compression() -> None:
    llm, examples = LLM(demo_model(), num_blocks=1024, enable_prefix_caching=False), EXAMPLES["demo"]
    params = [SamplingParams(temperature=0, max_tokens=each["max_tokens"]) for each in examples]
    compressed = [
        CompressionConfig("query_mixture", budget=each["budget"], recent=64, interval=64) for each in examples
    ]
    prompts = [each["prompt"] for each in examples]
    outputs = llm.generate(prompts * 2, params * 2, [None] * len(examples) + compressed)
    for output, example in zip(outputs, examples * 2, strict=True):
        assert output.outputs[0].text.split() == example["answer"].split()
    assert all(output.metrics.blocks_freed > 50 for output in outputs[len(examples) :])


def test_a_model_with_another_vocabulary_gets_a_text(tiny_server: Running) -> None:
    assert web.get(f"{tiny_server.base_url}/page/examples").json() == EXAMPLES["text"]


def test_the_demo_model_gets_its_tasks(page_server: Running) -> None:
    assert web.get(f"{page_server.base_url}/page/examples").json() == EXAMPLES["demo"]


def test_tiers_are_in_the_frame_where_there_are_some(server: Running, tmp_path: Path) -> None:
    with feed_of(server) as events:
        name, frame = next(events)
        assert name == "frame"
        assert frame["tiers"] is None
    sizes = {"kv_offloading_size": 4e6 / 2**30, "kv_offloading_disk_size": 8e6 / 2**30}
    llm = LLM(demo_model(), num_blocks=64, kv_offloading_disk_path=str(tmp_path), **sizes)
    with running_server(llm) as below:
        body = {"model": MODEL, "prompt": "GO sky " * 60, "max_tokens": 1}
        for _ in range(2):
            answer = web.post(f"{below.base_url}/v1/completions", json=body)
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        with feed_of(below) as events:
            tiers = next(data for name, data in events if name == "frame")["tiers"]
        stats = web.get(f"{below.base_url}/kv_offload/status").json()["tiers"]
    host, disk = stats["host"], stats["disk"]["slots"]
    assert tiers["slots"] == {
        name: [slots["in_use"], slots["cached"], slots["free"]]
        for name, slots in (("host", host), ("disk", disk))
    }
    assert tiers["hits"] == {"device": cached, "host": 0, "disk": 0}
    assert tiers["down"]["host"] == stats["moves"]["store_bytes"] > 0
    assert tiers["up"] == {"host": 0, "disk": 0}
    assert (tiers["parked"], tiers["swaps"]) == ([0, 0], 0)
