"""The page inside vLLM without vLLM: what it answers, what it refuses, and that no step waits for it."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from toy_page import LIMIT_S, ToyPool, feed_of, frame_with, serving, shrunk

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.live import server as page_http
from kvreclaim.integrations.vllm.live.recorder import StepRecorder
from kvreclaim.integrations.vllm.live.server import PageServer
from kvreclaim.integrations.vllm.settings.page_address import PageAddress


@pytest.fixture
def pool() -> ToyPool:
    return ToyPool(40)


@pytest.fixture
def page(pool: ToyPool) -> Iterator[PageServer]:
    with serving(pool) as server:
        yield server


def get(page: PageServer, path: str, method: str = "GET", **headers: str) -> httpx2.Response:
    return httpx2.request(method, page.url.rstrip("/") + path, headers=headers, timeout=LIMIT_S)


def step(page: PageServer, *passes: Any) -> None:
    """The calls of the scheduler's thread in a step."""
    page.recorder.begin_step()
    page.recorder.passed(passes)
    page.recorder.end_step()


def test_its_files_and_nothing_that_sends(page: PageServer) -> None:
    index = get(page, "/")
    assert index.status_code == 200
    assert index.headers["content-security-policy"].startswith("default-src 'self'")
    assert "Block pool" in index.text
    for word in ("<form", "<textarea", "server--", "/metrics", "completions"):
        assert word not in index.text, word
    for name in ("main.js", "style.css", "icon.svg"):
        assert get(page, f"/page/static/{name}").status_code == 200
    settings = get(page, "/page/settings").json()
    assert (settings["models"], settings["num_blocks"]) == (["toy"], 40)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_nothing_but_get(page: PageServer, method: str) -> None:
    for path in ("/", "/page/feed", "/page/settings"):
        answer = get(page, path, method)
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize("path", ["/metrics", "/page/static/", "/page/static/../files.py", "/page/examples"])
def test_nothing_else_is_there(page: PageServer, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(page.url.split(":")[2][:-1]), timeout=LIMIT_S)
    connection.request("GET", path)
    assert connection.getresponse().status == 404
    connection.close()


def test_a_foreign_name_is_refused(page: PageServer) -> None:
    port = page.url.split(":")[2][:-1]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example"):
        answer = get(page, "/page/feed", host=host)
        assert answer.status_code == 403
        assert "page_host" in answer.json()["error"]["message"]
    for host in ("localhost", f"localhost:{port}", f"[::1]:{port}", "a.localhost", "10.1.2.3"):
        assert get(page, "/", host=host).status_code == 200


def raw(page: PageServer, data: bytes) -> bytes:
    """Read the response to its end."""
    with socket.create_connection(("127.0.0.1", int(page.url.split(":")[2][:-1])), timeout=LIMIT_S) as client:
        client.sendall(data)
        return b"".join(iter(lambda: client.recv(4096), b""))


def test_what_is_no_request(page: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert raw(page, b"hello\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw(page, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 4000).startswith(b"HTTP/1.1 431")
    monkeypatch.setattr(page_http, "HEAD_S", 0.05)
    assert raw(page, b"GET / HTTP/1.1\r\n").startswith(b"HTTP/1.1 408")
    with suppress(ConnectionResetError):
        raw(page, b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n")
    assert get(page, "/").status_code == 200


def test_connections_and_viewers_are_bounded(page: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with feed_of(page) as events:
        next(events)
        monkeypatch.setattr("kvreclaim.page.feed.MAX_VIEWERS", 1)
        refused = get(page, "/page/feed")
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            429,
            "too many pages watch; close one of them.",
        )
        monkeypatch.setattr(page_http, "MAX_CONNECTIONS", 1)
        assert get(page, "/").status_code == 503


def test_an_idle_pool_is_shown_without_a_step(page: PageServer, pool: ToyPool) -> None:
    pool.tables = {"kept": [3, 4]}
    with feed_of(page) as events:
        frame = frame_with(events)
        assert frame["blocks"]["in_use"] == 2
        assert frame["first"] == 1
        assert frame["state"].nonzero()[0].tolist() == [2, 3]
        pool.tables = {}
        assert frame_with(events, requests=[])["blocks"]["free"] == 40


def test_while_requests_run_the_scheduler_reads(page: PageServer, pool: ToyPool) -> None:
    """The scheduler reads once for each frame that the page wants; not at all while no viewer watches."""
    pool.idle = False
    for _ in range(5):
        step(page)
    assert pool.num_looks == 0
    stop = threading.Event()
    threads: set[str] = set()
    look = pool.look

    def noted(passes: Any) -> Any:
        threads.add(threading.current_thread().name)
        return look(passes)

    page.recorder._look = noted

    def schedule() -> None:
        number = 0
        while not stop.wait(0.002):
            number += 1
            pool.tables = {"r1": list(range(1, 1 + number % 30 + 1)), "r2": [35, 36]}
            step(page)

    thread = threading.Thread(target=schedule, name="scheduler")
    thread.start()
    try:
        with feed_of(page) as events:
            for _ in range(4):
                frame = frame_with(events)
                [[first, _, _, held, *_], [second, *_]] = frame["requests"]
                assert (first, second) == ("r1", "r2")
                assert frame["blocks"]["in_use"] == held + 2
                assert (frame["owner"] == 1).sum() == held
                assert (frame["owner"] == 2).nonzero()[0].tolist() == [34, 35]
    finally:
        stop.set()
        thread.join()
    assert threads == {"scheduler"}


def test_compactions_are_sent_before_the_frame(page: PageServer, pool: ToyPool) -> None:
    pool.idle = False
    step(page, shrunk("before", [1, 2], [1], evicted=32))
    stop = threading.Event()

    def schedule() -> None:
        sent = False
        while not stop.wait(0.002):
            passes = []
            if page.recorder._watched and not sent:
                sent, pool.tables = True, {"r": [7]}
                passes = [shrunk("r", [7, 8, 9], [7], evicted=64)]
            step(page, *passes)

    thread = threading.Thread(target=schedule)
    thread.start()
    try:
        with feed_of(page) as events:
            name, data = next(event for event in events if event[0] == "compactions")
            assert data["passes"] == [["r", 3, 1, 2, 64]]
            assert data["blocks"] == "BwAAAAgAAAA="  # places 7 and 8: vLLM's blocks 8 and 9
            assert frame_with(events)["requests"][0][0] == "r"
    finally:
        stop.set()
        thread.join()
    assert name == "compactions"


def test_what_was_read_while_a_step_began_is_dropped() -> None:
    pool = ToyPool(4)
    recorder = StepRecorder(pool.look, lambda: True, lambda snapshot: None)
    recorder.watch(True)
    recorder.passed([shrunk("r", [1, 2], [1], evicted=32)])
    look = pool.look

    def disturbed(passes: Any) -> Any:
        recorder.begin_step()
        return look(passes)

    recorder._look = disturbed
    assert recorder.look_idle() is None
    recorder._look = look
    snapshot = recorder.look_idle()
    assert snapshot is not None
    assert [each.request_id for each in snapshot.compactions] == ["r"]  # not lost

    def changed(passes: Any) -> Any:
        raise RuntimeError("dictionary changed size during iteration")

    recorder._look = changed
    assert recorder.look_idle() is None


def test_a_mistake_of_the_page_does_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    delivered: list[Any] = []

    def broken(passes: Any) -> Any:
        raise KeyError("no such thing")

    recorder = StepRecorder(broken, lambda: False, delivered.append)
    recorder.watch(True)
    for _ in range(3):
        recorder.request()
        recorder.begin_step()
        recorder.end_step()
    assert delivered == []
    [line] = caplog.records
    assert "the engine goes on" in line.getMessage()
    assert line.exc_info


def test_a_viewer_that_does_not_read_holds_up_no_other(page: PageServer, pool: ToyPool) -> None:
    port = int(page.url.split(":")[2][:-1])
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET /page/feed HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with feed_of(page) as events:
            for number in range(1, 4):
                pool.tables = {"r": list(range(1, number + 1))}
                assert frame_with(events, num_owners=1)["blocks"]["in_use"] >= 1
        step(page)  # returns


def test_a_viewer_that_takes_nothing_is_let_go(page: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_http, "WRITE_S", 0.01)
    with feed_of(page) as events:
        next(events)
        [connection] = page.server_state.connections
        page._loop.call_soon_threadsafe(connection.pause_writing)
        with pytest.raises(httpx2.TransportError):
            list(events)


def test_viewers_get_the_end_of_the_engine(pool: ToyPool) -> None:
    with serving(pool) as page:
        with feed_of(page) as events:
            next(events)
            page.close()
            assert [data for name, data in events if name == "end"] == [{"reason": "draining"}]
        step(page)  # a step after it changes nothing
    with pytest.raises(httpx2.ConnectError):
        get(page, "/")


def test_an_address_that_is_not_to_be_had(pool: ToyPool) -> None:
    with serving(pool) as page:
        port = int(page.url.split(":")[2][:-1])
        with (
            pytest.raises(InvalidArgumentError, match=f"page_port {port} .*already in use.*another port"),
            serving(pool, PageAddress(port)),
        ):
            pass
    with serving(pool, PageAddress(port)):
        pass  # it is free again
    with (
        pytest.raises(InvalidArgumentError, match=r"page_host 'nowhere.invalid'"),
        serving(pool, PageAddress(0, "nowhere.invalid")),
    ):
        pass


def test_each_rank_has_a_port_of_its_own() -> None:
    assert PageAddress(8700).of_rank(3) == PageAddress(8703)
    assert PageAddress(0, "::1").of_rank(3) == PageAddress(0, "::1")
    with pytest.raises(InvalidArgumentError, match="rank 1 would need port 65536; name one"):
        PageAddress(65_535).of_rank(1)


def test_nothing_of_it_is_loaded_without_page_port() -> None:
    modules = "kvreclaim.integrations.vllm.live.step_observer, kvreclaim.integrations.vllm.settings.options"
    loaded = f"import sys, {modules}; print(*(name for name in sys.modules if '.live.' in name))"
    output = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout
    assert "live.step_observer" in output
    for name in ("server", "http", "feed", "recorder"):
        assert f"live.{name}" not in output


def test_another_address_of_this_machine(pool: ToyPool) -> None:
    with serving(pool, PageAddress(0, "::1")) as page:
        assert page.url.startswith("http://[::1]:")
        assert get(page, "/").status_code == 200
