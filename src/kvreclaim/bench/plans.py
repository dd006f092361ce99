"""What the benchmarks of the engine and of the server measure: known, and checked, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvreclaim.bench.systems.base import NAMES, Fill, Point, Setup, System
from kvreclaim.checks import require
from kvreclaim.config import AUTO, format_names
from kvreclaim.options import check_options, option

if TYPE_CHECKING:
    from kvreclaim.compression import CompressionConfig

PEERS = ("transformers", "transformers-cb", "vllm")
DTYPES = ("bfloat16", "float32")
THREADS = "CPU threads, of every system."
KERNELS = "kvreclaim's kernels: auto, reference, native or triton."
VLLM_PYTHON = "Interpreter of vLLM's environment (`make vllm-env`)."


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What is measured. steps: of a timed slice, fewer where slice_s would be exceeded; limit_s: for one
    system at one point, all rounds together.

    kv_cache_dtypes: each of `systems` runs in each of these KV formats; one in a named format is called
                     SYSTEM:FORMAT
    """

    model: Path
    systems: tuple[str, ...] = option(NAMES, "kvreclaim's own, comma-separated.")
    peers: tuple[str, ...] = option((), "transformers, transformers-cb, vllm; comma-separated.")
    vllm_python: Path | None = option(None, VLLM_PYTHON)
    vllm_compile: bool = option(False, "vLLM with torch.compile.")
    contexts: tuple[int, ...] = option((1024, 8192, 16384, 32768), "Tokens in each cache.")
    batches: tuple[int, ...] = option((1, 8, 32), "Sequences.")
    threads: int = option(2, THREADS, low=1)
    dtype: str = option("bfloat16", "bfloat16 or float32.", choices=DTYPES)
    kernels: str = option("auto", KERNELS)
    kv_cache_dtypes: tuple[str, ...] = option(
        (AUTO,),
        "KV formats, comma-separated, timed in turns: auto, bf16, int8, int4 and so on.",
        flags=("--kv-cache-dtype",),
    )
    budget: int = option(2048, "Of the policies, tokens.", low=1, unit=" tokens")
    interval: int = option(128, "Of the policies, tokens.", low=1, unit=" token")
    rounds: int = option(3, "Slices of each system, in turns.", low=1)
    steps: int = option(64, "Most steps of a timed slice.", low=1)
    slice_s: float = option(4.0, "Most seconds of a timed slice.", low=0.0, high=86_400.0)
    limit_s: float = option(120.0, "Most seconds of one system at one point.", low=0.0, high=86_400.0)
    fill: Fill = option("synthetic", "synthetic or prefill.", choices=("synthetic", "prefill"), typed_as=str)

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "kv_cache_dtypes", format_names(self.kv_cache_dtypes))
        unknown = sorted({*self.systems, *self.peers} - {*NAMES, *PEERS})
        require(not unknown, f"no system is called {unknown[:1]}; allowed: {', '.join(NAMES + PEERS)}.")
        require(
            "vllm" not in self.peers or self.vllm_python is not None,
            "vllm is among the peers, but --vllm-python is not set; run `make vllm-env` and pass "
            ".vllm-env/bin/python.",
        )
        require(
            min((*self.contexts, *self.batches), default=0) > 0,
            "contexts and batches must be positive; raise them.",
        )

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
        from kvreclaim.bench.systems.hf import ContinuousBatching, Generate
        from kvreclaim.bench.systems.ours import Ours
        from kvreclaim.bench.systems.vllm_peer import Vllm

        if name == "transformers":
            return Generate(setup)
        if name == "transformers-cb":
            return ContinuousBatching(setup)
        if name == "vllm":
            assert self.vllm_python is not None, "checked in __post_init__"
            return Vllm(setup, points, python=self.vllm_python, eager=not self.vllm_compile)
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
        return _compression(policy, self.budget, self.interval)


@dataclass(frozen=True, slots=True)
class CompressPlan:
    """Every context at the base's budget, then every budget at `budget_context`; by policy and batch."""

    base: DecodePlan
    policies: tuple[str, ...] = option(("triattention", "query_mixture"), "Comma-separated.")
    contexts: tuple[int, ...] = option((8192, 32_768, 131_072), "At the base's budget, 2048.")
    budgets: tuple[int, ...] = option((512, 2048, 8192), "At --budget-context.")
    batches: tuple[int, ...] = option((1,), "Sequences.")
    budget_context: int = option(32_768, "Tokens.", low=1)
    intervals: int = 2

    def points(self) -> Iterator[tuple[int, int, int]]:
        """(context, batch, budget), none twice, none whose context is within its budget."""
        wanted = [(c, b, self.base.budget) for b in self.batches for c in self.contexts]
        wanted += [(self.budget_context, b, budget) for b in self.batches for budget in self.budgets]
        for context, batch, budget in dict.fromkeys(wanted):
            if context > budget + self.base.interval:
                yield context, batch, budget


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Many long requests in one pool. The pool holds the K/V of `pool_requests` whole ones."""

    model: Path
    policies: tuple[str, ...] = option(("full", "triattention", "query_mixture"), "Comma-separated.")
    requests: int = option(20, "Sent at once.", low=1)
    prompt: int = option(2048, "Tokens of each.", low=1)
    output: int = option(8192, "Tokens of each.", low=1)
    pool_requests: int = option(4, "Whole requests whose K/V the pool holds.", low=1, flags=("--pool",))
    budget: int = option(2048, "Of the policies, tokens.", low=1, unit=" tokens")
    interval: int = option(128, "Of the policies, tokens.", low=1, unit=" token")
    vllm_python: Path | None = option(None, VLLM_PYTHON)
    threads: int = option(2, THREADS, low=1)
    dtype: str = option("bfloat16", "bfloat16 or float32.", choices=DTYPES)
    kernels: str = option("auto", KERNELS)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def length(self) -> int:
        return self.prompt + self.output

    def compression(self, policy: str) -> CompressionConfig | None:
        return None if policy == "full" else _compression(policy, self.budget, self.interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """What is run.

    num_prompt, num_output: tokens of each request
    arrivals: requests of the run under load, which come at load x what the engine did offline at the most
              streams; 0: no such run
    trace:    whose lengths, times scale, the requests of that run have; None: num_prompt and num_output
    """

    model: Path
    streams: tuple[int, ...] = option((1, 8, 32, 64), "Concurrent streams.")
    num_prompt: int = option(64, "Prompt tokens of each.", low=1, flags=("--prompt",))
    num_output: int = option(256, "Generated tokens of each.", low=1, flags=("--output",))
    rounds: int = option(3, "Of both sides, in turns.", low=1)
    threads: int = option(1, THREADS, low=1)
    num_blocks: int = option(4096, "Of the pool, on both sides.", low=1)
    dtype: str = option("auto", "auto, bfloat16 or float32.")
    arrivals: int = option(0, "Requests of a run under load; 0: none.", low=0)
    load: float = option(0.7, "Of that run: share of what the engine can do offline.", low=0.01, high=100.0)
    trace: Path | None = option(None, "CSV with TIMESTAMP,ContextTokens,GeneratedTokens: their lengths.")
    scale: float = option(0.1, "Of the trace's lengths.", low=0.0001, high=100.0)
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        require(
            bool(self.streams) and min(self.streams) > 0,
            f"--streams is {self.streams}; pass one or more numbers of concurrent streams, each at least 1.",
        )
        if self.trace is not None:
            require(self.arrivals > 0, "--trace is given, but no request arrives; add --arrivals.")
            require(self.trace.is_file(), f"--trace is {str(self.trace)!r}, which is no file; name a CSV.")


def _compression(policy: str, budget: int, interval: int) -> CompressionConfig:
    from kvreclaim.compression import CompressionConfig

    return CompressionConfig(policy, budget, interval, recent=min(128, budget // 4))
