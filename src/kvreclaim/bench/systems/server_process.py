"""A server in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from time import monotonic
from urllib.error import URLError
from urllib.request import urlopen

from kvreclaim.bench.systems.base import SkipPoint

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
STOP_S = 30.0
WAIT_S = 0.2


class ServerProcess:
    """One server on this machine. Its log is a temporary file, kept if the server fails.

    name: for messages; command: starts it on `port`
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], port: int) -> None:
        self.name, self.url = name, f"http://{HOST}:{port}"
        handle, log = tempfile.mkstemp(prefix="server-", suffix=".log")
        self.log = Path(log)
        self.process = subprocess.Popen(
            list(command),
            stdout=handle,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        os.close(handle)

    def wait(self) -> None:
        """Wait until it is healthy. Raises: SkipPoint."""
        deadline = monotonic() + START_TIMEOUT_S
        pause = Event()
        while monotonic() < deadline:
            if self.process.poll() is not None:
                raise SkipPoint(f"`{self.name}` ended ({self._log_tail()})")
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return
            except (URLError, OSError):
                pause.wait(WAIT_S)
        raise SkipPoint(f"`{self.name}` was not healthy in {START_TIMEOUT_S:.0f} s; its log is {self.log}")

    def close(self) -> None:
        """End it and its child processes."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        if self.process.returncode == 0:
            self.log.unlink(missing_ok=True)

    def _log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"exit code {self.process.poll()}, log {self.log}: {lines[-1][:200] if lines else 'empty'}"


def free_port() -> int:
    """Return a port that no other socket gets for a minute; servers bind it once their model is loaded."""
    with socket.create_server((HOST, 0)) as listener:
        port = int(listener.getsockname()[1])
        with socket.create_connection((HOST, port)) as client:
            listener.accept()[0].close()
            client.recv(1)
    return port
