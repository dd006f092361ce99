"""What the benchmarks measure: known, and checked, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreclaim.bench.systems.base import NAMES, OURS, Fill, Point, System, SystemSetup
from kvreclaim.checks import check_choice, require
from kvreclaim.compression.spec.traits import traits
from kvreclaim.config import AUTO, format_name, format_names
from kvreclaim.memory import eviction_orders
from kvreclaim.options import check_options, option

if TYPE_CHECKING:
    from kvreclaim.compression.config import CompressionConfig

PEERS = ("transformers", "transformers-cb", "vllm")
DTYPES = ("bfloat16", "float32")
MODEL = Path("bench_models/qwen3-26m")
THREADS = "CPU threads, of every system."
KERNELS = "kvreclaim's kernels: auto, reference, native or triton."
VLLM_PYTHON = "Interpreter of vLLM's environment (`make vllm-env`)."


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A benchmark of one model directory."""

    model: Path = option(MODEL, "Model directory; `make bench-model` makes this one.")
    threads: int = option(2, THREADS, low=1, high=1024)
    dtype: str = option("bfloat16", "bfloat16 or float32.", choices=DTYPES)

    def __post_init__(self) -> None:
        check_options(self)
        require(
            self.model.is_dir() or (self.model.suffix == ".gguf" and self.model.is_file()),
            f"--model is {str(self.model)!r}, which is no directory and no .gguf file; run `make "
            "bench-model`, or name another one.",
        )

    @property
    def setup(self) -> SystemSetup:
        return SystemSetup(self.model, self.dtype, self.threads)

    def facts(self) -> dict[str, Any]:
        """What every row says of it."""
        return {"model": self.model.name, "dtype": self.dtype, "threads": self.threads}


@dataclass(frozen=True, kw_only=True)
class BeamsPlan(ModelPlan):
    """prompt, max_tokens: tokens; rounds: in turns, of which medians are taken."""

    beams: tuple[int, ...] = option((4,), "Beam widths, comma-separated.")
    prompt: int = option(2048, "Tokens of the prompt.", low=1)
    max_tokens: int = option(64, "Tokens of each output.", low=1)
    rounds: int = option(3, "Timed, in turns.", low=1)


@dataclass(frozen=True, kw_only=True)
class PrefillPlan(ModelPlan):
    """Every method at every length beside dense, in turns, of which medians are taken."""

    methods: tuple[str, ...] = option(
        (
            "pooled",
            "pooled(alpha=0.3)",
            "xattention",
            "a_shape(local=2048)",
            "vertical_slash(vertical=1000, slash=2048)",
            "block_sparse(top=32)",
        ),
        "Ways of sparse prefill, comma-separated.",
    )
    lengths: tuple[int, ...] = option((8192, 16384, 32768), "Tokens of the prompts, comma-separated.")
    text: Path | None = option(None, "UTF-8 text whose beginning is the prompt; else random tokens.")
    kernels: str = option("auto", KERNELS)
    rounds: int = option(3, "Timed, in turns.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.methods), "--methods names none; pass for example pooled,a_shape.")
        require(
            bool(self.lengths) and min(self.lengths, default=0) >= 1,
            f"--lengths are {self.lengths}; pass tokens, such as 8192,16384.",
        )
        check_text_file(self.text)


@dataclass(frozen=True, kw_only=True)
class ChunksPlan(ModelPlan):
    """Every way of reusing the chunks of a prompt beside the whole prompt, in turns, of which medians are
    taken."""

    reuse: tuple[str, ...] = option(
        ("change", "question", "deviation", "first", "random", "none"),
        "Ways of reusing chunks, comma-separated.",
    )
    num_chunks: int = option(4, "Chunks.", low=1)
    chunk_tokens: int = option(1024, "Tokens of each.", low=32)
    head: int = option(32, "Tokens before the first chunk.", low=1)
    question: int = option(32, "Tokens behind the last one.", low=1)
    text: Path | None = option(None, "UTF-8 text that is cut into chunks; else random tokens.")
    kernels: str = option("auto", KERNELS)
    rounds: int = option(5, "Timed, in turns.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.reuse), "--reuse names none; pass for example change,none.")
        check_text_file(self.text)


def check_text_file(text: Path | None) -> None:
    """Raises: InvalidArgumentError where it is no file."""
    require(
        text is None or text.is_file(),
        f"--text is {str(text)!r}, which is no file; name one, or leave it out.",
    )


@dataclass(frozen=True, kw_only=True)
class PolicyPlan(ModelPlan):
    """One with policies, all at one budget."""

    budget: int = option(2048, "Of the policies, tokens.", low=1, unit=" tokens")
    interval: int = option(128, "Of the policies, tokens.", low=1, unit=" token")

    def policy(self, name: str) -> CompressionConfig | None:
        """None: "full", the full cache."""
        from kvreclaim.compression.config import CompressionConfig

        if name == "full":
            return None
        return CompressionConfig(name, self.budget, self.interval, recent=min(128, self.budget // 4))


@dataclass(frozen=True, kw_only=True)
class PeersPlan(PolicyPlan):
    """One that compares with vLLM."""

    kernels: str = option("auto", KERNELS)
    vllm_python: Path | None = option(None, VLLM_PYTHON)


@dataclass(frozen=True, kw_only=True)
class DecodePlan(PeersPlan):
    """What is measured. steps: of a timed slice, fewer where slice_s would be exceeded; limit_s: for one
    system at one point, all rounds together.

    kv_cache_dtypes: each of `systems` runs in each of these KV formats; one in a named format is called
                     SYSTEM:FORMAT
    """

    systems: tuple[str, ...] = option(NAMES, "full and policies, comma-separated.")
    peers: tuple[str, ...] = option((), "transformers, transformers-cb, vllm; comma-separated.")
    vllm_compile: bool = option(False, "vLLM with torch.compile.")
    contexts: tuple[int, ...] = option((1024, 8192, 16384, 32768), "Tokens in each cache.")
    batches: tuple[int, ...] = option((1, 8, 32), "Sequences.")
    kv_cache_dtypes: tuple[str, ...] = option(
        (AUTO,),
        "KV formats, comma-separated, timed in turns: auto, bf16, int8, int4 and so on.",
        flags=("--kv-cache-dtype",),
    )
    rounds: int = option(3, "Slices of each system, in turns.", low=1)
    steps: int = option(64, "Most steps of a timed slice.", low=1)
    slice_s: float = option(4.0, "Most seconds of a timed slice.", low=0.0, high=86_400.0)
    limit_s: float = option(120.0, "Most seconds of one system at one point.", low=0.0, high=86_400.0)
    fill: Fill = option("synthetic", "synthetic or prefill.", choices=("synthetic", "prefill"), typed_as=str)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kv_cache_dtypes", format_names(self.kv_cache_dtypes))
        unknown = [*(set(self.peers) - {*PEERS}), *(name for name in self.systems if not _is_ours(name))]
        require(
            not unknown,
            f"no system is called {unknown[:1]}; allowed: kvreclaim-full, kvreclaim- and a policy, and "
            f"{', '.join(PEERS)}.",
        )
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

    def points(self) -> list[Point]:
        """The grid, smallest first."""
        new_tokens = (self.rounds + 1) * max(self.steps, self.interval) + 8
        return [Point(c, b, new_tokens, self.fill) for c in self.contexts for b in self.batches]

    def make(self, name: str, setup: SystemSetup, points: list[Point]) -> System:
        """A system by its name, loaded."""
        from kvreclaim.bench.systems.hf import ContinuousBatching, Generate
        from kvreclaim.bench.systems.ours import KvreclaimSystem
        from kvreclaim.bench.systems.vllm_peer import Vllm

        if name == "transformers":
            return Generate(setup)
        if name == "transformers-cb":
            return ContinuousBatching(setup)
        if name == "vllm":
            assert self.vllm_python is not None, "checked in __post_init__"
            return Vllm(setup, points, python=self.vllm_python, eager=not self.vllm_compile)
        config, form = self.compression(name), self.kv_cache_dtype(name)
        return KvreclaimSystem(name, setup, points, config=config, kernels=self.kernels, kv_cache_dtype=form)

    def kv_cache_dtype(self, name: str) -> str:
        """KV format of a kvreclaim system."""
        return name.partition(":")[2] or AUTO

    def compression(self, name: str) -> CompressionConfig | None:
        """Compression of a system; None: it keeps the full cache."""
        system = name.partition(":")[0]
        return self.policy(system.removeprefix(OURS)) if system.startswith(OURS) else None


def _is_ours(name: str) -> bool:
    """Whether it is the full cache or a policy, as its name is written."""
    policy = name.removeprefix(OURS)
    if policy == name:
        return False
    if policy != "full":
        traits(policy)
    return True


@dataclass(frozen=True, slots=True)
class CompressPlan:
    """Every context at the base's budget, then every budget at `budget_context`; by policy and batch."""

    base: DecodePlan
    policies: tuple[str, ...] = option(("triattention", "query_mixture"), "Comma-separated.")
    contexts: tuple[int, ...] = option((8192, 32_768, 131_072), "At the base's budget, 2048.")
    budgets: tuple[int, ...] = option((512, 2048, 8192), "At --budget-context.")
    batches: tuple[int, ...] = option((1,), "Sequences.")
    budget_context: int = option(32_768, "Tokens.", low=1)
    together: int = option(8, "Sequences due together; 0: leave it out.", low=0)
    rounds: int = option(7, "Of passes that are due together.", low=1)
    intervals: int = 2

    def __post_init__(self) -> None:
        check_options(self)

    def points(self) -> Iterator[tuple[int, int, int]]:
        """(context, batch, budget), none twice, none whose context is within its budget."""
        wanted = [(c, b, self.base.budget) for b in self.batches for c in self.contexts]
        wanted += [(self.budget_context, b, budget) for b in self.batches for budget in self.budgets]
        for context, batch, budget in dict.fromkeys(wanted):
            if context > budget + self.base.interval:
                yield context, batch, budget


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(PeersPlan):
    """Many long requests in one pool. The pool holds the K/V of `pool_requests` whole ones."""

    policies: tuple[str, ...] = option(("full", "triattention", "query_mixture"), "Comma-separated.")
    requests: int = option(20, "Sent at once.", low=1)
    prompt: int = option(2048, "Tokens of each.", low=1)
    output: int = option(8192, "Tokens of each.", low=1)
    pool_requests: int = option(4, "Whole requests whose K/V the pool holds.", low=1, flags=("--pool",))

    @property
    def length(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, kw_only=True)
class ServePlan(PolicyPlan):
    """What is run.

    num_prompt, num_output: tokens of each request
    compress: the policy of every request, on both sides
    arrivals: requests of the run under load, which come at load x what the engine did offline at the most
              streams; 0: no such run
    trace:    whose lengths, times scale, the requests of that run have; None: num_prompt and num_output
    """

    streams: tuple[int, ...] = option((1, 8, 32, 64), "Concurrent streams.")
    num_prompt: int = option(64, "Prompt tokens of each.", low=1, flags=("--prompt",))
    num_output: int = option(256, "Generated tokens of each.", low=1, flags=("--output",))
    rounds: int = option(7, "Of both sides, in turns.", low=1)
    threads: int = option(1, THREADS, low=1, high=1024)
    num_blocks: int = option(4096, "Of the pool, on both sides.", low=1)
    dtype: str = option("auto", "auto, bfloat16 or float32.")
    compress: str = option("full", "The policy of every request.", flags=("--policy",))
    spread_compression: bool = option(True, "Requests are compressed at different steps.")
    engine_process: bool = option(True, "The server's engine in a process of its own; else in a thread.")
    arrivals: int = option(0, "Requests of a run under load; 0: none.", low=0)
    load: float = option(0.7, "Of that run: share of what the engine can do offline.", low=0.01, high=100.0)
    trace: Path | None = option(None, "CSV with TIMESTAMP,ContextTokens,GeneratedTokens: their lengths.")
    scale: float = option(0.1, "Of the trace's lengths.", low=0.0001, high=100.0)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.streams) and min(self.streams) > 0,
            f"--streams is {self.streams}; pass one or more numbers of concurrent streams, each at least 1.",
        )
        if self.trace is not None:
            require(self.arrivals > 0, "--trace is given, but no request arrives; add --arrivals.")
            require(self.trace.is_file(), f"--trace is {str(self.trace)!r}, which is no file; name a CSV.")


@dataclass(frozen=True, kw_only=True)
class LatentPlan:
    """Prefill over latents, at DeepSeek-V3's head dims."""

    contexts: tuple[int, ...] = option((0, 1024, 8192), "Tokens before the new ones.")
    new_tokens: tuple[int, ...] = option((16, 64, 128, 171, 256, 512), "Tokens computed at once.")
    heads: int = option(16, "Query heads: 16 in V2-Lite, 128 in V2 and V3.", low=1)
    threads: int = option(2, THREADS, low=1, high=1024)
    dtype: str = option("bfloat16", "bfloat16 or float32.", choices=DTYPES)
    kernels: str = option("auto", KERNELS)
    device: str = option("cpu", "cpu or cuda.")
    kv_cache_dtype: str = option(AUTO, "One KV format, or auto.")
    rounds: int = option(3, "Of both ways, in turns.", low=1)

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "kv_cache_dtype", format_name(self.kv_cache_dtype))


@dataclass(frozen=True)
class PrefixPlan:
    """The replay of a trace. sizes: of the caches, beside which an infinite one is replayed."""

    trace: Path = option(MISSING, "JSON lines with hash_ids, such as Mooncake's.")
    sizes: tuple[int, ...] = option(
        (1000, 4000, 16_000, 64_000), "Sizes of the cache, in blocks of the trace.", flags=("--blocks",)
    )
    orders: tuple[str, ...] = option(eviction_orders(), "Eviction orders, comma-separated.")
    pins: bool = option(False, "Also two tenants, one of which pins all it sends.")

    def __post_init__(self) -> None:
        require(bool(self.orders), "--orders is empty; name at least one eviction order, such as lru.")
        for order in self.orders:
            check_choice("an entry of --orders", order, eviction_orders())
