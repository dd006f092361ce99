"""`vllm serve` in a process of its own, and vLLM's own client against it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from urllib.request import urlopen

from kvreclaim.bench.common import Row
from kvreclaim.bench.systems.base import SkipPoint
from kvreclaim.bench.systems.server_process import HOST, ServerProcess, free_port
from kvreclaim.bench.systems.vllm_peer import environment

MAIN = ("-m", "vllm.entrypoints.cli.main")
NAME = "measured"
CLIENT_TIMEOUT_S = 1200.0
SAMPLE_S = 0.5


class VllmServer(ServerProcess):
    """One server on a free port of this machine.

    options: of `vllm serve`, without the two dashes; None: a flag without a value
    Raises: SkipPoint if it does not start.
    """

    def __init__(
        self,
        python: Path,
        threads: int,
        pool_bytes: int,
        model: Path,
        options: Mapping[str, object],
        *,
        plugin: bool,
    ) -> None:
        self.model, self._command = model, [str(python), *MAIN]
        self._environment = environment(python, threads, pool_bytes) | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_PLUGINS": "kvreclaim" if plugin else "",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        port = free_port()
        given = {"host": HOST, "port": port, "served-model-name": NAME, **options}
        pairs = (
            [f"--{name}"] if value is None else [f"--{name}", str(value)] for name, value in given.items()
        )
        command = [*self._command, "serve", str(model), "--enforce-eager", *chain(*pairs)]
        super().__init__("vllm serve", command, self._environment, port)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, summed over labels."""
        found: dict[str, float] = {}
        with urlopen(f"{self.url}/metrics", timeout=60) as page:
            for line in page.read().decode().splitlines():
                if line and not line.startswith("#"):
                    name, value = line.partition("{")[0].partition(" ")[0], line.rpartition(" ")[2]
                    found[name] = found.get(name, 0.0) + float(value)
        return found

    def bench(self, arguments: Sequence[str]) -> Row:
        """Run `vllm bench serve` to its end. Returns: the file of --save-result. Raises: SkipPoint."""
        with tempfile.TemporaryDirectory() as folder:
            command = [*self._command, "bench", "serve", "--model", NAME, "--tokenizer", str(self.model)]
            command += ["--base-url", self.url, "--disable-tqdm", *arguments]
            command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
            try:
                done = subprocess.run(
                    command,
                    env=self._environment,
                    capture_output=True,
                    text=True,
                    timeout=CLIENT_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise SkipPoint(f"`vllm bench serve` took longer than {CLIENT_TIMEOUT_S:.0f} s") from None
            if done.returncode != 0:
                raise SkipPoint(f"`vllm bench serve` failed: {done.stderr.strip()[-500:]}")
            result: Row = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
            return result


class Gauges:
    """Reads gauges of a server twice a second during its block. values: by name, at moments with a running
    request; at_s: these moments, in seconds since the first"""

    def __init__(self, server: VllmServer, running: str, names: Sequence[str]) -> None:
        self.server, self.running, self.names = server, running, names
        self.values: dict[str, list[float]] = {name: [] for name in names}
        self.at_s: list[float] = []
        self._stop = Event()
        self._thread = Thread(target=self._read)

    def __enter__(self) -> Gauges:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        started: float | None = None
        while not self._stop.wait(SAMPLE_S):
            found = self.server.metrics()
            if found[self.running]:
                started = started or monotonic()
                self.at_s.append(monotonic() - started)
                for name in self.names:
                    self.values[name].append(found[name])
