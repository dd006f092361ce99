"""llama.cpp in its own process and environment."""

from __future__ import annotations

import os
from pathlib import Path

from kvreclaim.bench.systems.base import Point, SystemSetup
from kvreclaim.bench.systems.worker_process import Peer, WorkerProcess

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
