"""vLLM in its own process and environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from kvreclaim.bench.common import Row
from kvreclaim.bench.systems.base import (
    CHUNK,
    Point,
    SkipPoint,
    Slice,
    SystemSetup,
)
from kvreclaim.bench.systems.worker_process import Peer, PeerSession, WorkerProcess
from kvreclaim.memory.blocks import blocks_for

BLOCK_SIZE = 128
"""vLLM's default on a CPU."""
START_TIMEOUT_S = 600.0


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
        self.facts = self.ask("load", timeout_s=START_TIMEOUT_S, **usual | options)
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
