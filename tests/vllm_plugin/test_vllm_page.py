"""Views for users of the plugin: the page of the pool, the metrics of the dashboard, a line in the log."""

from __future__ import annotations

import base64
import json
import logging
import re
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import httpx
import numpy as np
import openai
import pytest
from engines import Engine
from models import random_prompts
from serving import Served, serving

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.live import server as page_server
from kvreclaim.integrations.vllm.live import step_observer
from kvreclaim.page.view import SHARED

SETTINGS = {"policy": "streaming_llm", "budget": 128, "interval": 64, "recent": 32}
POOL = 129
LIMIT_S = 300.0
DASHBOARD = Path(__file__).parents[2] / "examples/observability/grafana/vllm.json"


def unpacked(frame: dict[str, Any]) -> dict[str, Any]:
    raw, num = zlib.decompress(base64.b64decode(frame["cells"])), frame["num_blocks"]
    assert frame["group"] == 1
    return frame | {
        "owner": np.frombuffer(raw[: 2 * num], "<u2"),
        "state": np.frombuffer(raw[2 * num :], np.uint8),
    }


def events_of(url: str) -> Iterator[tuple[str, Any]]:
    """(name, data) of the feed of the page at this address, until it ends."""
    with httpx.stream("GET", f"{url}page/feed", timeout=LIMIT_S, trust_env=False) as answer:
        assert answer.status_code == 200
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = json.loads(line[6:])
                yield name, unpacked(data) if name == "frame" else data


class Watcher:
    """Reads a feed in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.events: list[tuple[str, Any]] = []
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        with suppress(httpx.TransportError):
            for event in events_of(url):
                with self._news:
                    self.events.append(event)
                    self._news.notify_all()

    def frames(self) -> list[dict[str, Any]]:
        return [data for name, data in self.events if name == "frame"]

    def await_frame(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        with self._news:
            found = self._news.wait_for(lambda: next(filter(holds, self.frames()), None), LIMIT_S)
        assert found, self.events[-1:]
        return found

    def join(self) -> None:
        """Wait until the feed has ended."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def logged_lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that the plugin logs from here on; vLLM sets its own loggers up anew when it starts."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.Logger("of the test", logging.INFO)
    logger.addHandler(handler)
    for module in (step_observer, page_server):
        assert module.logger.name == "vllm.kvreclaim"
        monkeypatch.setattr(module, "logger", logger)
    return lines


def counted(engine: Engine) -> dict[str, Any]:
    """The pool's own figures: free as vLLM's queue has it, blocks by how many hold them, by request."""
    manager = engine.scheduler.kv_cache_manager
    tables = manager.coordinator.single_type_managers[0].req_to_blocks
    refs = Counter(min(block.ref_cnt, 2) for block in engine.pool.blocks[1:])
    return {
        "unused": engine.pool.get_num_free_blocks(),
        "alone": refs[1],
        "shared": refs[2],
        "held": {
            one.request_id: sum(not block.is_null for block in tables[one.request_id])
            for one in engine.scheduler.running
        },
        "computed": {one.request_id: one.num_computed_tokens for one in engine.scheduler.running},
    }


@pytest.mark.parametrize("policy", ["streaming_llm", "ada_kv(knorm)"])  # equal heads, and unequal ones
def test_the_page_shows_what_the_pool_counts(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(step_observer, "EVERY", 7)
    lines = logged_lines(monkeypatch)
    compression = {**SETTINGS, "policy": policy, "page_port": 0}
    engine = Engine(tiny_model, compression=compression, num_blocks=POOL)
    page, totals = engine.scheduler.observer.page, engine.scheduler.reclaim.totals
    assert f"kvreclaim: the block pool is shown at {page.url}" in lines
    delivered: list[dict[str, Any]] = []
    deliver = page.recorder._deliver

    def noted(snapshot: Any) -> None:
        delivered.append({"at_s": snapshot.at_s, **counted(engine)})
        deliver(snapshot)

    page.recorder._deliver = noted
    watcher = Watcher(page.url)
    first = watcher.await_frame(lambda frame: True)
    assert first["blocks"] == {"free": POOL - 1, "cached": 0, "pinned": 0, "in_use": 0, "shared": 0}
    assert first["first"] == 1
    prompts = random_prompts((300, 200, 500), seed=3)
    for prompt, tokens in zip(prompts, (1200, 1200, 500), strict=True):
        engine.add(prompt, tokens, settings="off" if prompt is prompts[1] else "on")
    steps = count()

    def a_twin_comes() -> None:
        if next(steps) == 30:
            engine.add(prompts[1], 1200, settings="off")

    watch = engine.run(after_step=a_twin_comes)
    last = watcher.await_frame(lambda frame: frame["at_s"] > first["at_s"] and not frame["requests"])
    engine.close()
    watcher.join()
    assert watcher.events[-1] == ("end", {"reason": "draining"})
    check_frames(watcher.frames(), delivered)
    assert watch.preemptions == 0
    passes = [each for name, data in watcher.events if name == "compactions" for each in data["passes"]]
    assert len(passes) == totals.compactions > 20
    assert sum(each[3] for each in passes) == totals.blocks_freed == last["totals"]["blocks_freed"]
    assert sum(each[4] for each in passes) == totals.tokens_evicted
    assert last["totals"]["generation_tokens"] == 3 * 1200 + 500
    assert last["blocks"]["in_use"] == last["blocks"]["shared"] == 0
    assert last["blocks"]["cached"] + last["blocks"]["free"] == POOL - 1
    reported = [int(found[1]) for line in lines if (found := re.match(r"kvreclaim: (\d+) passes: ", line))]
    assert reported == list(range(7, totals.compactions + 1, 7))


def check_frames(frames: list[dict[str, Any]], delivered: list[dict[str, Any]]) -> None:
    """Compare every frame with requests running to what the pool counted at its moment."""
    own = {each["at_s"]: each for each in delivered}
    compared = [(frame, own[frame["at_s"]]) for frame in frames if frame["at_s"] in own]
    assert len(compared) >= 5
    for frame, pool in compared:
        blocks = frame["blocks"]
        assert blocks["free"] + blocks["cached"] == pool["unused"]
        assert (blocks["in_use"], blocks["shared"]) == (pool["alone"], pool["shared"])
        assert {each[0]: each[3] for each in frame["requests"]} == pool["held"]
        assert {each[0]: each[1] for each in frame["requests"]} == pool["computed"]
        for index, (_, logical, physical, held, evicted, _, promise) in enumerate(frame["requests"]):
            assert promise.startswith("budget ") or (promise == "" and evicted == 0)
            assert physical == logical - evicted
            assert -(-physical // 32) <= held <= -(-physical // 32) + 1
            owned = (frame["owner"] == index + 1).sum()
            assert owned <= held
            assert owned == held or (frame["state"] == SHARED).any()
    assert any(pool["shared"] for _, pool in compared)  # two prompts are the same
    assert any(frame["num_spared"] for frame, _ in compared)
    assert any(each[5] for frame, _ in compared for each in frame["requests"])  # compaction frees
    assert len({len(frame["requests"]) for frame, _ in compared}) >= 2  # they come and go


def test_a_port_in_use_ends_the_start(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=f"page_port {port} .*in use.*name another port"):
            Engine(tiny_model, compression={**SETTINGS, "page_port": port}, num_blocks=POOL)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = ("--block-size", "32", "--num-gpu-blocks-override", str(POOL), "--max-model-len", "2048")
    limits += ("--max-num-batched-tokens", "256", "--max-num-seqs", "8")
    folder = tmp_path_factory.mktemp("server")
    with serving(tiny_model, folder, {**SETTINGS, "page_port": 0}, *limits) as served:
        yield served


def page_of(server: Served) -> str:
    [url] = re.findall(r"the block pool is shown at (http://\S+)", server.text())
    return url


def complete(server: Served, **more: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        prompt = random_prompts((300,), seed=5)[0]
        return client.completions.create(
            model="tiny", prompt=prompt, extra_body={"ignore_eos": True}, **{"max_tokens": 400, **more}
        )


def test_a_server_shows_its_pool_in_the_process_of_its_scheduler(server: Served) -> None:
    watcher = Watcher(page_of(server))
    idle = watcher.await_frame(lambda frame: True)
    assert idle["num_running"] == 0
    tokens = 1600  # seconds of work, so that all three are seen at once
    more = {"max_tokens": tokens}
    answers = [threading.Thread(target=complete, args=(server,), kwargs=more) for _ in range(3)]
    for each in answers:
        each.start()
    running = watcher.await_frame(lambda frame: frame["num_running"] == 3)
    assert running["blocks"]["in_use"] > 0
    for each in answers:
        each.join()
    after = watcher.await_frame(
        lambda frame: frame["num_running"] == 0 and frame["totals"]["generation_tokens"] == 3 * tokens
    )
    assert after["blocks"]["in_use"] == 0
    assert after["totals"]["blocks_freed"] == server.counters()["kvreclaim_blocks_freed_total"] > 0
    counters = server.counters("vllm:")
    assert after["totals"]["prefix_query_tokens"] == counters["vllm:prefix_cache_queries_total"]
    assert after["totals"]["prefix_hit_tokens"] == counters["vllm:prefix_cache_hits_total"] > 0
    words = json.dumps([(name, data["requests"]) for name, data in watcher.events if name == "frame"])
    assert '"cmpl-' in words  # ids, and nothing of the prompts


def test_what_the_dashboard_asks_for_is_there(server: Served) -> None:
    complete(server, max_tokens=100)
    with urlopen(f"{server.url}/metrics", timeout=LIMIT_S) as page:
        samples = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
    labels: dict[str, set[str]] = {}
    bounds: dict[str, set[str]] = {}
    for line in samples:
        name = re.match(r"[\w:]+", line)[0]  # type: ignore[index]
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', line))
        bounds.setdefault(name, set()).update(re.findall(r'le="([^"]+)"', line))
    board = json.loads(DASHBOARD.read_text())
    variables = board["templating"]["list"]
    choices = {each["name"]: each["query"].split(",") for each in variables if each["type"] == "custom"}
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(expressions) >= 25
    for expression in expressions:
        found = re.findall(r"((?:vllm:|kvreclaim_)[a-z0-9_]+)\{([^}]*)\}", expression)
        assert found, expression
        for name, selector in found:
            assert name in labels, expression
            assert set(re.findall(r"(\w+)=~?\"", selector)) <= labels[name] | {"instance"}, expression
            for variable in re.findall(r'le="\$(\w+)"', selector):
                assert set(choices[variable]) <= bounds[name], expression
        for by in re.findall(r"by \((\w+)\)", expression):
            assert all(by in labels[name] for name, _ in found), expression
    shown = {name for expression in expressions for name in re.findall(r"kvreclaim_\w+", expression)}
    assert shown == {name for name in labels if name.startswith("kvreclaim_") and name.endswith("_total")}


def test_it_ends_with_the_server(server: Served) -> None:
    url = page_of(server)
    watcher = Watcher(url)
    watcher.await_frame(lambda frame: True)
    assert server.stop() == 0
    watcher.join()  # after the event of the end, or cut off by the front end's own deadline
    with pytest.raises(httpx.ConnectError):
        next(events_of(url))
    assert not re.findall(r'File ".*/kvreclaim/.*', server.text())
