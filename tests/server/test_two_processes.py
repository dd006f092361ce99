"""`kvreclaim serve` when one of its two processes is killed: the other notices, and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import psutil
import pytest
import web
from serve_command import Served, served
from steering import LIMIT_S, until

MODEL = "kvreclaim-demo"
LONG = {"model": MODEL, "prompt": "GO wind", "max_tokens": 4000, "ignore_eos": True}


class Streaming:
    """A long stream, read in a thread."""

    def __init__(self, server: Served) -> None:
        self.url = server.base_url + "/v1/completions"
        self.events: list[dict[str, Any]] = []
        self._thread = Thread(target=self._read)
        self._thread.start()
        until(lambda: self.events)

    def _read(self) -> None:
        with (
            suppress(httpx2.TransportError),
            web.stream("POST", self.url, json={**LONG, "stream": True}) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))

    def join(self) -> list[dict[str, Any]]:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self.events


def test_an_engine_that_is_killed_ends_answers_and_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        stream = Streaming(server)
        os.kill(server.engine.pid, signal.SIGKILL)
        last = stream.join()[-1]
        assert "failed inside the engine" in last["error"]["message"]
        assert server.process.wait(LIMIT_S) == 1
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        fatal = [line for line in lines if line["level"] == "critical"]
        assert [log["message"] for log in fatal] == ["the engine has stopped: its process ended by signal 9"]


def test_health_tells_that_the_engine_has_gone(tmp_path: Path) -> None:
    """Stopped at the moment between the two ends, by a server that lets its last clients read for long."""
    patched = "from kvreclaim.server.entry import run; run.LAST_BYTES_S = 300"
    start = "from kvreclaim.cli.main import app; app()"
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [sys.executable, "-c", f"{patched}; {start}", "serve", "--model", "demo", "--port", "0"]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: "at http://" in log.read_text() or process.poll() is not None)
        server = Served(process, re.search(r"at (http://[\d.:]+)", log.read_text())[1], log)
        assert web.get(f"{server.base_url}/health").status_code == 200
        os.kill(server.engine.pid, signal.SIGKILL)
        until(lambda: web.get(f"{server.base_url}/health").status_code == 503)
        message = web.get(f"{server.base_url}/health").json()["error"]["message"]
        assert message == "the engine has stopped (its process ended by signal 9); restart the server."
        refused = web.post(f"{server.base_url}/v1/completions", json=LONG)
        assert refused.status_code == 503
        assert "vllm:num_requests_running" in web.get(f"{server.base_url}/metrics").text
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow("an engine alone ends when its socket closes: test_process_engine.py")
def test_a_server_that_is_killed_takes_its_engine_along(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        stream, engine = Streaming(server), server.engine
        server.process.kill()
        stream.join()
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
