"""What the decode benchmark measures, and which systems it knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvreclaim.bench.systems.base import Fill, Point, Setup, System
from kvreclaim.bench.systems.hf import ContinuousBatching, Generate
from kvreclaim.bench.systems.ours import NAMES, Ours
from kvreclaim.bench.systems.vllm_peer import Vllm
from kvreclaim.compression import CompressionConfig
from kvreclaim.errors import InvalidArgumentError

AUTO = "auto"
PEERS = ("transformers", "transformers-cb", "vllm")


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What is measured. steps: of a timed slice, fewer where slice_s would be exceeded; limit_s: for one
    system at one point, all rounds together.

    kv_cache_dtypes: each of `systems` runs in each of these KV formats; one in a named format is called
                     SYSTEM:FORMAT
    """

    model: Path
    dtype: str = "bfloat16"
    threads: int = 2
    contexts: tuple[int, ...] = (1024, 8192, 16384, 32768)
    batches: tuple[int, ...] = (1, 8, 32)
    systems: tuple[str, ...] = NAMES
    peers: tuple[str, ...] = ()
    vllm_python: Path | None = None
    vllm_eager: bool = True
    kernels: str = "auto"
    kv_cache_dtypes: tuple[str, ...] = (AUTO,)
    budget: int = 2048
    interval: int = 128
    rounds: int = 3
    steps: int = 64
    slice_s: float = 4.0
    limit_s: float = 120.0
    fill: Fill = "synthetic"

    def __post_init__(self) -> None:
        unknown = sorted({*self.systems, *self.peers} - {*NAMES, *PEERS})
        if unknown:
            raise InvalidArgumentError(
                f"no system is called {unknown[0]!r}; allowed: {', '.join(NAMES + PEERS)}."
            )
        if "vllm" in self.peers and self.vllm_python is None:
            raise InvalidArgumentError(
                "vllm is among the peers, but --vllm-python is not set; run `make vllm-env` and pass "
                ".vllm-env/bin/python."
            )
        if self.dtype not in ("bfloat16", "float32"):
            raise InvalidArgumentError(f"dtype is {self.dtype!r}; pass bfloat16 or float32.")
        if min((*self.contexts, *self.batches, self.rounds, self.steps), default=0) < 1:
            raise InvalidArgumentError("contexts, batches, rounds and steps must be positive; raise them.")

    @property
    def names(self) -> tuple[str, ...]:
        """All systems, peers last."""
        ours = (
            system if form == AUTO else f"{system}:{form}"
            for system in self.systems
            for form in self.kv_cache_dtypes
        )
        return (*ours, *self.peers)

    @property
    def setup(self) -> Setup:
        return Setup(self.model, self.dtype, self.threads)

    def points(self) -> list[Point]:
        """The grid, smallest first."""
        new_tokens = (self.rounds + 1) * max(self.steps, self.interval) + 8
        return [Point(c, b, new_tokens, self.fill) for c in self.contexts for b in self.batches]

    def make(self, name: str, setup: Setup, points: list[Point]) -> System:
        """A system by its name, loaded."""
        if name == "transformers":
            return Generate(setup)
        if name == "transformers-cb":
            return ContinuousBatching(setup)
        if name == "vllm":
            assert self.vllm_python is not None, "checked in __post_init__"
            return Vllm(setup, points, python=self.vllm_python, eager=self.vllm_eager)
        config, form = self.compression(name), self.kv_cache_dtype(name)
        return Ours(name, setup, points, config=config, kernels=self.kernels, kv_cache_dtype=form)

    def kv_cache_dtype(self, name: str) -> str:
        """Of one of ours."""
        return name.partition(":")[2] or AUTO

    def compression(self, name: str) -> CompressionConfig | None:
        """Of a compressing system; None: it keeps the full cache."""
        system = name.partition(":")[0]
        policy = system.removeprefix("kvreclaim-")
        if system not in NAMES or policy == "full":
            return None
        return CompressionConfig(policy, self.budget, self.interval, recent=min(128, self.budget // 4))
