"""A signal to the served process: running requests are answered, new ones refused, and it exits."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest
import web
from steering import LIMIT_S, until
from typer.testing import CliRunner

from kvreclaim import LLM, SamplingParams, demo_model
from kvreclaim.cli.main import app

HALTING = Path(__file__).with_name("serve_halting.py")
FIRST_TOKENS = 20
MODEL = "kvreclaim-demo"
PROMPTS = ["GO wind wave", "GO sky sun", "GO fish"]
ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/messages"]


@dataclass
class Served:
    """go: lets answers go on beyond their first tokens. halted: how many have come so far."""

    process: subprocess.Popen
    base_url: str
    log: Path
    go: Path
    halted: Path

    def until_halted(self, num_answers: int) -> None:
        until(lambda: self.halted.exists() and self.halted.read_text() == str(num_answers))

    def exit_code(self) -> int:
        return self.process.wait(LIMIT_S)


@contextmanager
def served(tmp_path: Path, *options: str) -> Iterator[Served]:
    """`kvreclaim serve` on the demo model and a free port. No answer ends before the test lets it."""
    log, go, halted = (tmp_path / name for name in ("log", "go", "halted"))
    with log.open("w") as file:
        halting = [sys.executable, HALTING, go, halted, str(FIRST_TOKENS)]
        command = [*halting, "serve", "--model", "demo", "--port", "0", "--log-format", "text", *options]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: re.search(r"at http://\S+", log.read_text()) or process.poll() is not None)
        found = re.search(r"at (http://\S+)", log.read_text())
        assert found is not None, log.read_text()
        server = Served(process, found[1], log, go, halted)
        until(lambda: _answers(server))
        yield server
    finally:
        process.kill()
        process.wait()


def _answers(server: Served) -> bool:
    with suppress(httpx2.ConnectError):
        return web.get(f"{server.base_url}/health").status_code == 200
    return False


class Reader:
    """A greedy request of its own thread: its text, its finish reason, and the client's error."""

    def __init__(self, server: Served, path: str, prompt: str, num_tokens: int, *, stream: bool) -> None:
        self.path, self.prompt, self.stream = path, prompt, stream
        message = [{"role": "user", "content": prompt}]
        content = {"prompt": prompt} if path == ROUTES[0] else {"messages": message}
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": num_tokens}
        self.body = {"model": MODEL, "stream": stream, **content, **greedy}
        self.url = server.base_url + path
        self.text = ""
        self.reason: str | None = None
        self.status: int | None = None
        self.error: Exception | None = None
        self.complete = False
        self._thread = Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with web.stream("POST", self.url, json=self.body) as answer:
                self.status = answer.status_code
                if self.stream:
                    self._events(answer.iter_lines())
                else:
                    self._whole(json.loads(answer.read()))
        except httpx2.TransportError as error:
            self.error = error

    def _events(self, lines: Iterator[str]) -> None:
        for line in lines:
            data = line.removeprefix("data: ")
            if data == "[DONE]" or data == line:
                self.complete = self.complete or data == "[DONE]"
                continue
            event = json.loads(data)
            self.complete = self.complete or event.get("type") == "message_stop"
            for choice in event.get("choices", ()):
                self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                self.reason = choice["finish_reason"] or self.reason
            delta = event.get("delta", {})
            self.text += delta.get("text", "")
            self.reason = delta.get("stop_reason") or self.reason

    def _whole(self, answer: dict[str, Any]) -> None:
        if "choices" in answer:
            [choice] = answer["choices"]
            self.text = choice.get("text") or choice["message"]["content"]
            self.reason = choice["finish_reason"]
        else:
            self.text = "".join(block["text"] for block in answer["content"])
            self.reason = answer["stop_reason"]
        self.complete = True

    def join(self) -> Reader:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        assert self.error is None, self.error
        assert self.status == 200
        assert self.complete
        return self


def start(server: Served, num_tokens: int) -> list[Reader]:
    """One request of each route and kind; returns once all of them have got so far."""
    kinds = [(path, stream) for path in ROUTES for stream in (True, False)]
    readers = [
        Reader(server, path, PROMPTS[i % len(PROMPTS)], num_tokens, stream=stream)
        for i, (path, stream) in enumerate(kinds)
    ]
    server.until_halted(len(kinds))
    return readers


@pytest.fixture(scope="module")
def alone() -> Callable[[str, int], str]:
    """(prompt, tokens) -> the greedy answer, without any server."""
    llm = LLM(demo_model(), num_blocks=512)

    @cache
    def answer(prompt: str, num_tokens: int) -> str:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
        return llm.generate(prompt, params)[0].outputs[0].text

    return answer


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGTERM, "--engine-process"), (signal.SIGINT, "--no-engine-process")]
)
def test_running_answers_are_finished_and_new_requests_refused(alone, tmp_path: Path, number, how) -> None:
    """A page that watches does not hold it up."""
    num_tokens = 100
    with (
        served(tmp_path, "--shutdown-timeout", "86400", how) as server,
        web.stream("GET", f"{server.base_url}/page/feed") as feed,
    ):
        lines = feed.iter_lines()
        next(lines)
        readers = start(server, num_tokens)
        server.process.send_signal(number)
        until(lambda: f"{number.name}: no new requests; {len(readers)} to finish" in server.log.read_text())
        again = "ctrl-C" if number == signal.SIGINT else "SIGTERM"
        assert f"in 86400 s at most; {again} again ends the server at once" in server.log.read_text()
        for path in ROUTES:
            assert refused(server, path)
        server.go.touch()
        for reader in readers:
            assert reader.join().text == alone(reader.prompt, num_tokens)
            assert reader.reason == ("max_tokens" if reader.path == ROUTES[2] else "length")
        for _ in lines:
            pass
        assert server.exit_code() == 0
        log = server.log.read_text()
        assert "Traceback" not in log
        assert "leaked" not in log


def refused(server: Served, path: str) -> bool:
    """A 503 of its dialect, or no connection any more."""
    content = {"prompt": "GO"} if path == ROUTES[0] else {"messages": [{"role": "user", "content": "GO"}]}
    try:
        answer = web.post(server.base_url + path, json={"model": MODEL, "max_tokens": 4, **content})
    except httpx2.TransportError:
        return True
    return answer.status_code == 503 and "shutting down" in answer.json()["error"]["message"]


def test_after_the_timeout_answers_end_with_what_they_have(alone, tmp_path: Path) -> None:
    num_tokens = 4000
    with served(tmp_path, "--shutdown-timeout", "0.2") as server:
        readers = start(server, num_tokens)
        server.process.terminate()
        for reader in readers:
            text = reader.join().text
            assert reader.reason == ABORTED[reader.path]
            assert FIRST_TOKENS <= len(text.split()) < num_tokens
            assert alone(reader.prompt, len(text.split()) + 8).startswith(text)
        assert server.exit_code() == 0
        log = server.log.read_text()
        assert f"{len(readers)} requests did not finish in 0.2 s" in log
        assert "Traceback" not in log


ABORTED = {ROUTES[0]: "abort", ROUTES[1]: "abort", ROUTES[2]: "pause_turn"}


def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    with served(tmp_path, "--shutdown-timeout", "86400") as server:
        Reader(server, ROUTES[0], PROMPTS[0], 4000, stream=True)
        server.until_halted(1)
        server.process.terminate()
        until(lambda: "SIGTERM: no new requests" in server.log.read_text())
        server.process.terminate()
        assert server.exit_code() == 128 + signal.SIGTERM
        assert "again: exiting at once" in server.log.read_text()


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", "--port", str(port)])
    assert done.exit_code == 2
    assert done.stdout == ""
    [sentence] = done.stderr.strip().splitlines()
    assert sentence == (
        f"error: cannot listen on 127.0.0.1:{port} (Address already in use); choose another --host or "
        "--port (0: any free port)."
    )
