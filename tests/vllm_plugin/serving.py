"""`vllm serve` in a process of its own, on a free port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

START_LIMIT_S = 300.0
STOP_LIMIT_S = 300.0


@dataclass(frozen=True)
class Served:
    """url without /v1; log: what the server wrote."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def counters(self, prefix: str = "kvreclaim_") -> dict[str, float]:
        """Samples on /metrics by name, summed over labels."""
        found: dict[str, float] = {}
        with urlopen(f"{self.url}/metrics", timeout=START_LIMIT_S) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(prefix):
                    name, value = line.partition("{")[0], line.rpartition(" ")[2]
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> int:
        """SIGTERM to the server's first process, as a supervisor would. Returns: its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=STOP_LIMIT_S)


@contextmanager
def serving(model: Path, folder: Path, compression: Mapping[str, Any], *arguments: str) -> Iterator[Served]:
    """Serve model as `tiny` until the block ends; the option by --additional-config."""
    port, log = _free_port(), folder / "server.log"
    # The tests' own environment keeps the core in the test process, which a server cannot.
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--enforce-eager"]
    command += ["--additional-config", json.dumps({"kv_compression": dict(compression)}), *arguments]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment | {"VLLM_LOGGING_LEVEL": "INFO"},
            start_new_session=True,
        )
    served = Served(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait(served)
        yield served
    finally:
        if process.poll() is None:
            try:
                served.stop()
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(served: Served) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        assert served.process.poll() is None, served.text()[-4000:]
        try:
            with urlopen(f"{served.url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)  # between two questions; what is waited for is the answer
    raise AssertionError(f"not healthy in {START_LIMIT_S:.0f} s: {served.text()[-4000:]}")


def _free_port() -> int:
    """A port that the kernel gives no socket for a minute, unless bind() names it as servers do: a connection
    to it has been closed by its own end. vLLM takes it first thing, before it loads a model."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            assert client.recv(1) == b""
    return port
