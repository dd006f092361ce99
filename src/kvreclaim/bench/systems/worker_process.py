"""vLLM and llama.cpp as peers in processes and environments of their own, controlled by JSON objects."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import AutoConfig

from kvreclaim.bench.common import Row
from kvreclaim.bench.systems.base import CHUNK, Point, Session, SkipPoint, Slice, System, SystemSetup
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model_paths import STATS_FILE, statistics_beside

ANSWER_TIMEOUT_S = 1800.0
LOOP = Path(__file__).with_name("worker_loop.py")


class WorkerProcess:
    """Sends commands and waits for answers. Its log is a temporary file.

    engine: its name for messages; worker: argument of worker_loop.py; option: sets its interpreter, made by
    `make TARGET`
    """

    engine: str
    worker: str
    option: str
    target: str

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        if not python.is_file():
            raise InvalidArgumentError(
                f"{self.option} is {str(python)!r}, which is no file; run `make {self.target}` and pass "
                f".{self.target}/bin/python, or leave {self.engine} out of --peers."
            )
        handle, name = tempfile.mkstemp(prefix=f"{self.target}-", suffix=".log")
        self.log, self.facts = Path(name), Row()
        self.process = subprocess.Popen(
            [str(python), str(LOOP), self.worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=handle,
            text=True,
            env=dict(environment),
        )
        os.close(handle)

    def ask(self, command: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> Row:
        """Run a command. Raises: SkipPoint with the engine's own error, or when it died or took too long."""
        assert self.process.stdin is not None, "standard input is a pipe"
        try:
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()
            answer: Row = json.loads(self._line(timeout_s))
        except (BrokenPipeError, json.JSONDecodeError) as error:
            self.close()
            raise SkipPoint(f"{self.engine}'s process ended ({self._log_tail()})") from error
        if "error" in answer:
            raise SkipPoint(f"{self.engine} failed: {answer['error']}")
        return answer

    def _line(self, timeout_s: float) -> str:
        stdout = self.process.stdout
        assert stdout is not None, "standard output is a pipe"
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            deadline = monotonic() + timeout_s
            while monotonic() < deadline:
                if selector.select(timeout=1.0):
                    return stdout.readline()
        self.process.kill()
        raise SkipPoint(f"{self.engine} gave no answer in {timeout_s:.0f} s")

    def _log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1][:200] if lines else "empty"
        return f"exit code {self.process.poll()}, log {self.log}: {last}"

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):  # it may have died with a command unread
                self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self.process.returncode == 0:
            self.log.unlink(missing_ok=True)


class Peer(System):
    """Answers from a process with known facts."""

    process: WorkerProcess

    def open(self, point: Point) -> PeerSession:
        return PeerSession(self.process, point)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return list(self.process.ask("generate", prompts=prompts, max_tokens=max_tokens)["tokens"])

    def close(self) -> None:
        self.process.close()


class PeerSession(Session):
    """Sequences that stay in the other system's cache."""

    def __init__(self, process: WorkerProcess, point: Point) -> None:
        self.process = process
        answer = process.ask(
            "open",
            prompts=point.prompts(process.facts["vocab_size"]),
            max_tokens=point.max_len - point.context,
            synthetic=point.fill == "synthetic",
        )
        self.fill_s = float(answer["fill_s"])

    def run(self, steps: int) -> Slice:
        answer = self.process.ask("run", steps=steps)
        return Slice(steps, answer["tokens"], answer["elapsed_s"])

    def close(self) -> None:
        self.process.ask("close")


START_TIMEOUT_S = 300.0


class LlamaCppProcess(WorkerProcess):
    engine, worker = "llama.cpp", "llamacpp_worker:LlamaCppWorker"
    option, target = "--llamacpp-python", "llamacpp-env"

    def __init__(self, python: Path, threads: int) -> None:
        super().__init__(python, os.environ | {"OMP_NUM_THREADS": str(threads)})


class LlamaCpp(Peer):
    """A GGUF file under flash attention, each sequence with a stream of its own.

    cache_type: f16, or q8_0 or q4_0 for keys and values
    """

    def __init__(self, name: str, setup: SystemSetup, *, python: Path, cache_type: str) -> None:
        self.name, self.cache_type = name, cache_type
        self.process = LlamaCppProcess(python, setup.threads)
        self.process.facts = self.process.ask(
            "load",
            timeout_s=START_TIMEOUT_S,
            model=str(setup.model),
            threads=setup.threads,
            cache_type=cache_type,
        )

    def facts(self) -> dict[str, object]:
        return {"kv_cache_dtype": self.cache_type, "build": self.process.facts["build"]}

    def versions(self) -> dict[str, str]:
        """Versions in the peer's own environment."""
        return {"llama-cpp-python": self.process.facts["llama-cpp-python"]}

    def new_bytes(self, point: Point) -> int:
        return int(self.process.facts["token_bytes"] * point.batch * (point.max_len + 256))


BLOCK_SIZE = 128
"""vLLM's default on a CPU."""
VLLM_START_TIMEOUT_S = 600.0


class VllmProcess(WorkerProcess):
    """plugin: whether vLLM loads kvreclaim's plugin; compression also needs the option"""

    engine, worker = "vLLM", "vllm_worker:Worker"
    option, target = "--vllm-python", "vllm-env"

    def __init__(self, python: Path, threads: int, pool_bytes: int, *, plugin: bool = False) -> None:
        plugins = {"VLLM_PLUGINS": "kvreclaim" if plugin else ""}
        super().__init__(python, environment(python, threads, pool_bytes) | plugins)

    def load(self, setup: SystemSetup, *, max_num_seqs: int, **options: Any) -> Row:
        """Start the engine, eager by default. options: vLLM's own. Returns: its facts."""
        usual = {"model": str(setup.model), "dtype": setup.dtype, "enforce_eager": True}
        usual |= {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max(CHUNK, max_num_seqs)}
        self.facts = self.ask("load", timeout_s=VLLM_START_TIMEOUT_S, **usual | options)
        return self.facts

    def versions(self) -> dict[str, str]:
        """Versions in the peer's own environment."""
        return {name: str(value) for name, value in self.facts.items() if name.startswith("vllm")}


def environment(python: Path, threads: int, pool_bytes: int) -> dict[str, str]:
    """Return this process's environment, with threads unbound as ours are; Intel's OpenMP preloaded, as vLLM
    advises, if installed and useful: with one thread it costs a fifth. Never enables compression."""
    openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    inherited = {name: value for name, value in os.environ.items() if name != "KVRECLAIM_VLLM"}
    return inherited | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, -(-pool_bytes // 2**30))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": str(openmp) if threads > 1 and openmp.is_file() else "",
    }


def link_model(model: Path, folder: Path) -> None:
    """Link the model's files without the statistics, which vLLM would read as weights."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name != STATS_FILE and file.suffix != ".gguf":
            (folder / file.name).symlink_to(file.resolve())


def compression_option(model: Path, stats: Path | None, **settings: object) -> Row:
    """Return the plugin's kv_compression, with the statistics that link_model leaves out. stats: None: those
    beside the model, if there are any"""
    file = stats or statistics_beside(model)
    return settings | ({"stats": str(file.absolute())} if file.is_file() else {})


def kv_bytes_per_token(model: Path, itemsize: int) -> int:
    """Keys and values of one token in all layers."""
    config: Any = AutoConfig.from_pretrained(model).get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * itemsize)


class Vllm(Peer):
    """Started once with a pool for the largest point."""

    name = "vllm"
    process: VllmProcess

    def __init__(self, setup: SystemSetup, points: list[Point], *, python: Path, eager: bool = True) -> None:
        itemsize = 4 if setup.dtype == "float32" else 2
        num_blocks = max(point.batch * (blocks_for(point.max_len, BLOCK_SIZE) + 1) for point in points) + 1
        self.block_bytes = BLOCK_SIZE * kv_bytes_per_token(setup.model, itemsize)
        self.touched = 0
        self.process = VllmProcess(python, setup.threads, num_blocks * self.block_bytes)
        self.process.load(
            setup,
            max_model_len=max(point.max_len for point in points),
            max_num_seqs=max(point.batch for point in points),
            num_gpu_blocks_override=num_blocks,
            block_size=BLOCK_SIZE,
            enforce_eager=eager,
        )
        self.eager = eager

    def facts(self) -> dict[str, object]:
        return {"block_size": BLOCK_SIZE, "eager": self.eager}

    def versions(self) -> dict[str, str]:
        return self.process.versions()

    def new_bytes(self, point: Point) -> int:
        """Pages of the pool are allocated at their first write and then stay."""
        needed = point.batch * (blocks_for(point.max_len, BLOCK_SIZE) + 1) * self.block_bytes
        return max(0, needed - self.touched)

    def open(self, point: Point) -> VllmSession:
        self.touched += self.new_bytes(point)
        return VllmSession(self.process, point)


class VllmSession(PeerSession):
    """Requests that compute one token in every step."""

    def __init__(self, process: WorkerProcess, point: Point) -> None:
        super().__init__(process, point)
        self.batch = point.batch

    def run(self, steps: int) -> Slice:
        done = super().run(steps)
        if done.tokens != steps * self.batch:
            raise SkipPoint(f"{done.tokens} tokens came in {steps} steps of {self.batch} sequences")
        return done
