"""Servers in processes of their own: kvreclaim's, llama.cpp's, and vLLM's with its own client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from kvreclaim.bench.common import Row
from kvreclaim.bench.plans import ServePlan
from kvreclaim.bench.systems.base import SkipPoint
from kvreclaim.bench.systems.worker_process import environment, kv_bytes_per_token
from kvreclaim.errors import InvalidArgumentError

HOST = "127.0.0.1"
START_TIMEOUT_S = 600.0
STOP_S = 30.0
WAIT_S = 0.2
ANSWER_TIMEOUT_S = 600.0


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

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        """Return the JSON of an answer."""
        request = Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return json.load(answer)

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


class LlamaCppServer(ServerProcess):
    """A GGUF file under flash attention, with a slot and a stream for each sequence. No prompt caching.

    binary: made by `make llamacpp-env`; cache_type: of keys and values; max_len: tokens of a sequence
    """

    def __init__(
        self, binary: Path, model: Path, *, threads: int, cache_type: str, sequences: int, max_len: int
    ) -> None:
        if not binary.is_file():
            raise InvalidArgumentError(
                f"llama-server must be next to --llamacpp-python, and {str(binary)!r} is no file; run "
                "`make llamacpp-env`, or leave llamacpp out of --peers."
            )
        port = free_port()
        options = {
            "host": HOST,
            "port": port,
            "model": model,
            "threads": threads,
            "parallel": sequences,
            "ctx-size": -(-max_len // 256) * 256 * sequences,
            "cache-type-k": cache_type,
            "cache-type-v": cache_type,
            "flash-attn": "on",
            "cache-ram": 0,
        }
        command = [str(binary), "--no-kv-unified"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        super().__init__("llama-server", command, os.environ, port)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens of each prompt up to an end token, which ignore_eos would make llama.cpp avoid."""
        options = {"n_predict": max_tokens, "temperature": 0, "return_tokens": True}
        answers = []
        for prompt in prompts:
            found = self.post("/completion", options | {"prompt": prompt, "cache_prompt": False})
            answers.append([int(token) for token in found["tokens"]])
        return answers


NAME = "measured"
PROGRAM = "from kvreclaim.cli.main import app; app()"


class KvreclaimServer(ServerProcess):
    """The model of a plan, without prefix caching."""

    def __init__(self, plan: ServePlan) -> None:
        port = free_port()
        options = {
            "model": plan.model,
            "served-model-name": NAME,
            "host": HOST,
            "port": port,
            "dtype": plan.dtype,
            "threads": plan.threads,
            "num-gpu-blocks-override": plan.num_blocks,
            "max-num-seqs": max(plan.streams),
            "quantized-activations": plan.activations,
            "log-format": "text",
        }
        if (compression := plan.policy(plan.compress)) is not None:
            options |= {
                "kv-compression": compression.policy,
                "kv-budget": compression.budget,
                "kv-compression-interval": compression.interval,
                "kv-recent": compression.recent,
            }
        command = [sys.executable, "-c", PROGRAM, "serve", "--no-enable-prefix-caching"]
        command += [] if plan.spread_compression else ["--no-spread-compression"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        command += [] if plan.engine_process else ["--no-engine-process"]
        super().__init__(
            "kvreclaim serve", command, os.environ | {"OMP_NUM_THREADS": str(plan.threads)}, port
        )


VLLM_BLOCK_SIZE = 32
"""Smallest block size that vLLM's CPU attention takes for all models; tokens."""
MAIN = ("-m", "vllm.entrypoints.cli.main")
CLIENT_TIMEOUT_S = 1200.0
SAMPLE_S = 0.5


class VllmServer(ServerProcess):
    """One server on a free port of this machine.

    options: of `vllm serve`, without the two dashes; None: a flag without a value. It has the plugin if
        there is an additional-config, which the plugin reads
    num_blocks: of the pool, one of them vLLM's null block
    Raises: SkipPoint if it does not start.
    """

    def __init__(
        self, python: Path, threads: int, num_blocks: int, model: Path, options: Mapping[str, object]
    ) -> None:
        self.model, self._command = model, [str(python), *MAIN]
        pool_bytes = num_blocks * VLLM_BLOCK_SIZE * kv_bytes_per_token(model, 2)
        self._environment = environment(python, threads, pool_bytes) | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_PLUGINS": "kvreclaim" if "additional-config" in options else "",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        port = free_port()
        given = {"host": HOST, "port": port, "served-model-name": NAME, **options}
        given |= {"block-size": VLLM_BLOCK_SIZE, "num-gpu-blocks-override": num_blocks}
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

    def __exit__(self, *_: object) -> None:
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
